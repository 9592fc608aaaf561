// Which keys a block of the backward kernels has.
#pragma once

#include "backward/params.cuh"
#include "common/block_order.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

// A block's sequence, KV head and part of the keys.
struct KeyPlace {
  int sequence, kv_head, part;
  int seqlen_q, seqlen_k;
  int64_t q_start, k_start;  // rows before the sequence's first, in packed tensors
};

// The block's number. A block that waits for lower numbers draws its own, so that blocks of lower numbers have started.
// shared: the address of four bytes that nothing else uses yet.
DEVICE int block_number(const BackwardParams& params, uint32_t shared) {
  if constexpr (!DETERMINISTIC) return int(blockIdx.x);
  if (threadIdx.x == 0) ptx::store_shared(shared, uint32_t(atomicAdd(params.tickets, 1)));
  __syncthreads();
  const int number = ptx::warp_uniform(int(ptx::load_shared(shared)));
  __syncthreads();  // all have read it
  return number;
}

DEVICE KeyPlace place_keys(const Params& params, int sequence, int kv_head, int part) {
  KeyPlace at{sequence, kv_head, part, params.seqlen_q, params.seqlen_k, 0, 0};
  if constexpr (VARLEN) {
    at.q_start = params.cu_seqlens_q[sequence];
    at.k_start = params.cu_seqlens_k[sequence];
    at.seqlen_q = int(params.cu_seqlens_q[sequence + 1] - at.q_start);
    at.seqlen_k = int(params.cu_seqlens_k[sequence + 1] - at.k_start);
  }
  return at;
}

// The first keys are seen by the most rows, so later parts have less work. Parts of packed sequences with the same
// number of tiles left have the same rank: a shorter sequence starts later, and its numbers without keys come first.
//
// A block has a higher number than those that it waits for: earlier parts of its sequence and KV head, and the same
// part of earlier heads and, if they are as long, of earlier sequences.
DEVICE KeyPlace locate_keys(const Params& params, int parts, int tile_keys, int number) {
  const auto [sequence_head, rank] = rank_block(number, parts, 1);
  KeyPlace at = place_keys(params, sequence_head / params.heads_kv, sequence_head % params.heads_kv, rank);
  if constexpr (VARLEN && UNEVEN) {
    const int missing = at_least(0, parts - (at.seqlen_k + tile_keys - 1) / tile_keys);
    at.part += rank < missing ? parts - missing : -missing;
  }
  return at;
}
