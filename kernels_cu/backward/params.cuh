// What a launch passes to the backward kernels: the forward's parameters, gradients, and scratch memory between them.
//
// Rows of queries come in slots: one for every tile of BLOCK_M rows of every sequence and query head, padded at the
// sequence's end. Packed sequences begin at the slot that they would have if each were followed by one tile more, which
// is never before the end of the last one and needs no sum over them:
//
//   slot      tile 0, head 0 | tile 0, head 1 | .. | tile 1, head 0 | ..      of sequence 0, then of sequence 1, ..
//   holds     BLOCK_M times lse, in base 2 unless NATURAL_LSE, and then BLOCK_M times delta in `statistics`, DQ_FLOATS of
//             dQ in `dq_sums`, and in `dq_turns` how many key tiles have added theirs
#pragma once

#include "common/params.cuh"

struct BackwardParams {  // pointers to what the variant does not use are null
  Params forward;  // out and lse are read
  const void* dout;
  const float* dlse;  // null if the LSE has no gradient
  void* dq;
  void* dk;
  void* dv;
  void* dbias;
  void* dsinks;  // of the sinks' type
  float* statistics;
  float* dq_sums;
  int32_t* dq_turns;
  float* dbias_sums;  // laid out like dbias, and dbias itself if that is float
  int32_t* dbias_turns;
  float* dsinks_parts;  // of each head, sequence and query tile
  int32_t* tickets;       // how many blocks have drawn their number, if DETERMINISTIC
  int32_t* ds_bounds;     // of each sequence and KV head, if DS_BITS; 0 between launches (backward/bounds.cuh)
  int32_t* ds_exponents;  // of each sequence and KV head, if DS_BITS: log2 of dS's factor
  Strides dout_strides;
  Strides dlse_strides;
  Strides dq_strides;
  Strides dk_strides;
  Strides dv_strides;
  Strides dbias_strides;
  int64_t dbias_size;
  int64_t dbias_turns_size;
  int32_t batch;
  int32_t pass;         // of backward_simple
  int32_t slot_floats;  // DQ_FLOATS, for the kernel that clears them
  int32_t slot_turns;   // of dq_turns
};

// What a gradient is stored as: unrounded if backward_sum adds up those of the sequences that share an operand.
template <bool SUMMED>
using Gradient = Choice<SUMMED, Accumulator<ELEMENT>, OUT_ELEMENT>;

enum Pass { QUERY_PASS, KEY_PASS, OPTION_PASS };  // of backward_simple, in the order of its launches

DEVICE int row_tiles_of(int seqlen_q) { return (seqlen_q + BLOCK_M - 1) / BLOCK_M; }

// The first slot of a sequence's tile, that of head 0. Those of the other heads follow.
DEVICE int64_t first_slot(const Params& params, int sequence, int tile) {
  int64_t tiles = int64_t(sequence) * row_tiles_of(params.seqlen_q);
  if constexpr (VARLEN) tiles = params.cu_seqlens_q[sequence] / BLOCK_M + sequence;
  return (tiles + tile) * params.heads_q;
}

// A block's sequence and query head, if blocks are numbered by sequence, then head, then one of `tiles` tiles of rows.
struct RowPlace {
  int sequence, head, tile;
  int seqlen_q;
  int64_t q_start;  // rows before the sequence's first, in packed tensors
};

DEVICE RowPlace locate_rows(const Params& params, int tiles) {
  const int sequence_head = int(blockIdx.x) / tiles, sequence = sequence_head / params.heads_q;
  RowPlace at{sequence, sequence_head % params.heads_q, int(blockIdx.x) % tiles, params.seqlen_q, 0};
  if constexpr (VARLEN) {
    at.q_start = params.cu_seqlens_q[sequence];
    at.seqlen_q = int(params.cu_seqlens_q[sequence + 1] - at.q_start);
  }
  return at;
}
