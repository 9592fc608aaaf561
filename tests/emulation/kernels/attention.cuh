// What the two small attention kernels share: fp16, head_dim 64, (batch * heads, seqlen, 64) rows without gaps. Tiles
// of 64 queries by 64 keys; online softmax in base 2; lse in natural logarithms. `bug` takes a piece of synchronisation
// away.
#pragma once

#include "ptx.cuh"

#ifndef BUG
#define BUG p.bug
#endif

constexpr int HEAD_DIM = 64, TILE = 64, STAGES = 2;
constexpr uint32_t TILE_BYTES = TILE * HEAD_DIM * 2;

struct Params {
  ptx::TensorMap q, k, v, out;  // sm_90a: {64, seqlen, batch * heads}, boxes {64, 64, 1}, 128-byte swizzle
  const uint16_t *q_rows, *k_rows, *v_rows;
  uint16_t* out_rows;
  float* lse;
  int seqlen_q, seqlen_k, causal, bug;
  float scale;
};

DEVICE uint32_t pack(float low, float high) {
  return ptx::float_to_half(low) | static_cast<uint32_t>(ptx::float_to_half(high)) << 16;
}

// Key tiles that the 64 queries from `first` on see; causal masks end at the last query and the last key.
DEVICE int key_tiles(const Params& p, int first) {
  int keys = p.seqlen_k;
  if (p.causal) keys = min(keys, first + TILE + p.seqlen_k - p.seqlen_q);
  return keys > 0 ? (keys + TILE - 1) / TILE : 0;
}

// A thread's part of 64 x 64 scores and outputs: rows `row` and `row` + 8, columns 8 j + 2 q + e, as mma and wgmma lay
// it out.
struct Softmax {
  float maximum[2], sum[2];

  __device__ __forceinline__ void start() { maximum[0] = maximum[1] = -INFINITY, sum[0] = sum[1] = 0.0f; }

  __device__ __forceinline__ void mask(const Params& p, float (&s)[32], int row, int key) const {
    const int diagonal = p.seqlen_k - p.seqlen_q;
#pragma unroll
    for (int i = 0; i < 32; i++) {
      const int column = key + i / 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2, query = row + 8 * (i / 2 % 2);
      if (column >= p.seqlen_k || (p.causal && column > query + diagonal)) s[i] = -INFINITY;
    }
  }

  // s: scores, then probabilities. o: rescaled to the new maximum.
  __device__ __forceinline__ void update(float (&s)[32], float (&o)[32], float scale) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float m = maximum[h];
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (i / 2 % 2 == h) m = fmaxf(m, s[i]);
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
      const float offset = m == -INFINITY ? 0.0f : m * scale, correction = ptx::ex2(maximum[h] * scale - offset);
      maximum[h] = m;
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < 32; i++) {
        if (i / 2 % 2 != h) continue;
        s[i] = ptx::ex2(s[i] * scale - offset);
        total += s[i];
        o[i] *= correction;
      }
      sum[h] = sum[h] * correction + total;
    }
  }

  // o: normalised. Returns in lse the two rows' log-sum-exps.
  __device__ __forceinline__ void finish(float (&o)[32], float (&lse)[2], float scale) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float total = sum[h];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (i / 2 % 2 == h) o[i] *= inverse;
      lse[h] = total > 0.0f ? (maximum[h] * scale + ptx::lg2(total)) * 0.69314718f : -INFINITY;
    }
  }
};
