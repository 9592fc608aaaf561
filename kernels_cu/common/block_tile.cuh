// What one block works on: a tile of query rows of one head of one sequence, and the keys that these rows see.
#pragma once

#include "common/block_order.cuh"

struct BlockTile {
  int sequence, head, kv_head;
  int seqlen_q, seqlen_k;
  int64_t q_start, k_start;  // rows before the sequence's first, in packed tensors
  int row_begin;
};

// The later rows of a causal sequence see the most keys, so they come first.
DEVICE BlockTile locate(const Params& params, int row_tiles) {
  BlockTile at;
  const auto [sequence_head, rank] = rank_block(int(blockIdx.x), row_tiles, params.heads_q / params.heads_kv);
  at.sequence = sequence_head / params.heads_q;
  at.head = sequence_head % params.heads_q;
  at.kv_head = at.head / (params.heads_q / params.heads_kv);
  at.seqlen_q = params.seqlen_q;
  at.seqlen_k = params.seqlen_k;
  at.q_start = at.k_start = 0;
  if constexpr (VARLEN) {
    at.q_start = params.cu_seqlens_q[at.sequence];
    at.k_start = params.cu_seqlens_k[at.sequence];
    at.seqlen_q = int(params.cu_seqlens_q[at.sequence + 1] - at.q_start);
    at.seqlen_k = int(params.cu_seqlens_k[at.sequence + 1] - at.k_start);
  }
  at.row_begin = (UNEVEN ? row_tiles - 1 - rank : rank) * BLOCK_M;
  return at;
}
