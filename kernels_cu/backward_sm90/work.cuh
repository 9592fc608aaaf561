// What a block of backward_sm90 works on: a tile of keys of one KV head, and the tiles of queries that see one of them.
//
//     steps   head 0: tiles first, first + 1 ..   head 1 of the group: tiles first, ..   ..
#pragma once

#include "backward/keys.cuh"
#include "common/mask.cuh"
#include "backward_sm90/layout.cuh"
#include "backward_sm90/params.cuh"

struct Work {
  KeyPlace at;
  Mask mask;
  int key_begin;
  SeenRows rows;             // that see one of the keys
  int first_head, heads;     // query heads of the KV head
  int first_tile, end_tile;  // of queries

  __device__ __forceinline__ int steps() const { return heads * (end_tile - first_tile); }
};

DEVICE Work work_of(const BackwardParams& params, const KeyPlace& at, int key_tile) {
  const Params& forward = params.forward;
  Work work;
  work.at = at;
  work.mask = make_mask(forward, at.seqlen_q, at.seqlen_k, at.sequence);
  work.key_begin = key_tile * BLOCK_N;
  work.rows = work.mask.rows(at.seqlen_q, work.key_begin, at_most(at.seqlen_k, work.key_begin + BLOCK_N));
  work.heads = forward.heads_q / forward.heads_kv;
  work.first_head = at.kv_head * work.heads;
  const bool seen = work.rows.begin < work.rows.end;
  work.first_tile = work.rows.begin / BLOCK_M;
  work.end_tile = seen ? (work.rows.end + BLOCK_M - 1) / BLOCK_M : work.first_tile;
  return work;
}

// Where a role is among the steps: which head and tile of queries, and which stage of the rings Q and dO are in.
struct Step {
  int head, tile;
  Ring<STAGES> ring;
  Ring<DO_STAGES> own_dout_ring;  // if it is not Q's

  __device__ __forceinline__ int dout_stage() const { return DO_STAGES == STAGES ? ring.stage : own_dout_ring.stage; }
  __device__ __forceinline__ uint32_t dout_parity() const { return DO_STAGES == STAGES ? ring.parity : own_dout_ring.parity; }

  __device__ __forceinline__ void advance(const Work& work) {
    if (++tile == work.end_tile) {
      tile = work.first_tile;
      head++;
    }
    ring.advance();
    own_dout_ring.advance();
  }
  __device__ __forceinline__ void restart(const Work& work) {
    head = work.first_head;
    tile = work.first_tile;
  }
};

DEVICE int64_t slot_of(const BackwardParams& params, const Work& work, const Step& step) {
  return first_slot(params.forward, work.at.sequence, step.tile) + step.head;
}

// How many tiles of keys add to the rows of dQ before this one.
DEVICE int dq_turn(const Work& work, const Step& step) {
  const int row_begin = step.tile * BLOCK_M, row_end = at_most(work.at.seqlen_q, row_begin + BLOCK_M);
  return work.mask.tiles<BLOCK_N>(row_begin, row_end).before(work.key_begin / BLOCK_N);
}

DEVICE int key_parts_of(const BackwardParams& params) { return (params.forward.seqlen_k + BLOCK_N - 1) / BLOCK_N; }

// The sequence, KV head and part of the keys of block `number`, in one register: some roles have none for the order.
DEVICE int block_of(const BackwardParams& params, int number) {
  const int parts = key_parts_of(params);
  const KeyPlace at = locate_keys(params.forward, parts, BLOCK_N, number);
  return (at.sequence * params.forward.heads_kv + at.kv_head) * parts + at.part;
}

// Calls `visit` for each tile of keys of the block, which is one unless a sequence is longer than the caller said.
// Tiles of a block are neighbours, so that it waits for no block with a higher number.
template <class Visit>
DEVICE void for_each_key_tile(const BackwardParams& params, int block, Visit&& visit) {
  const int parts = key_parts_of(params), sequence_head = block / parts, heads = params.forward.heads_kv;
  const KeyPlace at = place_keys(params.forward, sequence_head / heads, sequence_head % heads, block % parts);
  if constexpr (!VARLEN) {
    visit(work_of(params, at, at.part));
  } else {
    const int tiles = (at.seqlen_k + BLOCK_N - 1) / BLOCK_N, share = (tiles + parts - 1) / parts;
#pragma unroll 1
    for (int tile = at.part * share; tile < at_most(tiles, (at.part + 1) * share); tile++) {
      visit(work_of(params, at, tile));
    }
  }
}
