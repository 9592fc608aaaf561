// The scores of one consumer of backward_sm90, from product to gradient: 64 keys down, the queries of a tile across.
//
//                 queries 0 1 2 ..  of the tile                    lane 4g + t of warp w
//   keys 16w ..   s[4j + 0..1]   | s s | s s | ..                  key 16w + g      queries 8j + 2t, 8j + 2t + 1
//        16w + 8  s[4j + 2..3]   | s s | s s | ..                  key 16w + g + 8  the same queries
//
//   S^T --scale--> scores --2^(score - lse)--> P^T      packed, the A operand of dV += P^T dO
//   dP^T --delta, times P--> dS^T                       packed, the A operand of dK += dS^T Q; in shared memory, of dQ
#pragma once

#include "hopper_backward/work.cuh"
#include "mma/softmax.cuh"

using Format = FormatOf<ELEMENT>;
using Scores = float[BLOCK_M / 2];
using Weights = uint32_t[BLOCK_M / 16][4];

// A thread's two keys, key and key + 8.
struct Keys {
  int key;
  float to_log2[2];  // NaN for a key that holds a NaN or an infinity

  __device__ __forceinline__ int of(int half) const { return key + 8 * half; }
};

// What a step has to look at besides its products.
struct Hidden {
  bool masked;  // whether the consumer's pairs may be hidden
  bool block;   // whether those of loaded rows and keys of the block may be
};

DEVICE Hidden hidden_pairs(const Work& work, int row_begin, int first_key) {
  const int row_end = at_most(work.at.seqlen_q, row_begin + BLOCK_M);
  const int key_end = at_most(work.at.seqlen_k, work.key_begin + BLOCK_N);
  const bool past_end = VARLEN && row_begin + BLOCK_M > work.at.seqlen_q;
  return {past_end || !work.mask.all_visible(row_begin, row_end, first_key, first_key + KEYS),
          HIDES && (past_end || !work.mask.all_visible(row_begin, row_end, work.key_begin, key_end))};
}

// Puts zeros in the place of what hidden pairs have. A key is seen by rows of one range.
DEVICE void apply_mask(Scores& s, const Work& work, const Keys& keys, int row_begin) {
  const int first_row = row_begin + lane_id() % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int key = keys.of(half);
    const SeenRows rows = work.mask.rows(work.at.seqlen_q, key, key + 1);
    const int begin = key < work.at.seqlen_k ? rows.begin - first_row : BLOCK_M, end = rows.end - first_row;
#pragma unroll
    for (int i = 0; i < BLOCK_M / 4; i++) {
      const int query = i / 2 * 8 + i % 2;
      if (query < begin || ((WINDOW || VARLEN) && query >= end)) s[i / 2 * 4 + 2 * half + i % 2] = 0.0f;
    }
  }
}

// Line 11 of algorithm 2, P = exp(S - L): products to weights 2^(score - lse).
DEVICE void compute_p(Scores& s, const Keys& keys, uint32_t lses) {
#pragma unroll
  for (int block = 0; block < BLOCK_M / 8; block++) {
    uint32_t lse[2];
    ptx::load_shared_v2(lse, lses + block * 32 + lane_id() % 4 * 8);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float& x = s[4 * block + e];
      x = ptx::ex2(x * keys.to_log2[e / 2] - ptx::as_float(lse[e % 2]));
    }
  }
}

// Line 14, dS = P (dP - D).
DEVICE void compute_ds(Scores& dp, const Scores& p, uint32_t deltas) {
#pragma unroll
  for (int block = 0; block < BLOCK_M / 8; block++) {
    uint32_t delta[2];
    ptx::load_shared_v2(delta, deltas + block * 32 + lane_id() % 4 * 8);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float& x = dp[4 * block + e];
      x = p[4 * block + e] * (x - ptx::as_float(delta[e % 2]));
    }
  }
}

DEVICE void pack(Weights& to, const Scores& from) {
#pragma unroll
  for (int i = 0; i < BLOCK_M / 4; i++) to[i / 4][i % 4] = Format::pack(from[2 * i], from[2 * i + 1]);
}

// dS^T to a tile [query][key], whose rows are the A operand of dQ.
DEVICE void store_ds(uint32_t tile, const Weights& ds, int consumer) {
  const int query = lane_id() / 16 * 8 + lane_id() % 8;
  const int unit = consumer * (KEYS / 8) + threadIdx.x % WARPGROUP / 32 * 2 + lane_id() / 8 % 2;
#pragma unroll
  for (int i = 0; i < BLOCK_M / 16; i++) ptx::stmatrix_x4_trans(DsBoxes::place(tile, 16 * i + query, unit), ds[i]);
}
