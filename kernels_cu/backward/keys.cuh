// Which keys a block of the multiplying backward kernels has.
#pragma once

#include "backward/params.cuh"
#include "ptx/memory.cuh"
#include "ptx/warp.cuh"

// A block's sequence, KV head and part of the keys. Blocks are numbered by sequence, then KV head, then part.
struct KeyPlace {
  int sequence, kv_head, part;
  int seqlen_q, seqlen_k;
  int64_t q_start, k_start;  // rows before the sequence's first, in packed tensors
};

// The block's number. A block that waits for lower numbers draws its own, so that theirs are drawn, and they have started.
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

DEVICE KeyPlace locate_keys(const Params& params, int parts, int block) {
  const int sequence_head = block / parts;
  return place_keys(params, sequence_head / params.heads_kv, sequence_head % params.heads_kv, block % parts);
}
