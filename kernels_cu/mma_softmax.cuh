// Online softmax over the scores as mma.sync leaves them (Dao, arXiv 2307.08691, algorithm 1; Milakov, arXiv
// 1805.02867).
//
//            S of a warp: 16 rows, BLOCK_N keys in blocks of 8
//              lanes 4g .. 4g + 3:    t=0   t=1   t=2   t=3   t=0 ..
//     row g        s[block][0..1]   | s s | s s | s s | s s | s s ..     the four lanes of a quad own rows g and g + 8
//     row g + 8    s[block][2..3]   | s s | s s | s s | s s | s s ..     together: they share the rows' maxima
//
// Weights are 2^(s * to_log2 - base), base = maximum * to_log2: one multiply-add and one ex2 each. Where only the
// scale stands between the product and the score, to_log2 carries it and the maxima are those of the plain products.
#pragma once

#include "forward_params.cuh"
#include "philox.cuh"
#include "score.cuh"

// Descales may be 0 or negative, which maxima of plain products would not survive.
constexpr bool SCALE_ONLY = !SOFTCAP && !ALIBI && !BIAS && !SCORE_MOD && !DESCALES;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr uint32_t ALL_LANES = 0xffffffffu;

// Over the four lanes of a quad.
DEVICE float max_over_quad(float x) {
  x = max_of(x, __shfl_xor_sync(ALL_LANES, x, 1));
  return max_of(x, __shfl_xor_sync(ALL_LANES, x, 2));
}
DEVICE float sum_over_quad(float x) {
  x += __shfl_xor_sync(ALL_LANES, x, 1);
  return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

struct SoftmaxRow {
  float m;  // running maximum of the scores, the same in all lanes of the quad
  float l;  // running sum of the weights of this lane's keys

  // Takes the largest of a lane's new scores in. Weights are relative to the new base from here on; what was summed
  // before is to be multiplied by `correction`.
  __device__ __forceinline__ float raise(float largest, float to_log2, float& correction) {
    const float raised = max_of(m, max_over_quad(largest));
    const float base = raised == -INFINITY ? 0.0f : raised * to_log2;
    correction = ptx::ex2(m * to_log2 - base);
    m = raised;
    l *= correction;
    return base;
  }
};

// Drops weights of rows `row` and `row_below` (8 further), keys first_key + 8 * block + 2t and the next. Philox draws
// for four keys at a time, which two lanes share: each draws for one of the rows and hands half of the words over.
template <int BLOCKS>
DEVICE void drop(const Dropout& dropout, float (&p)[BLOCKS][4], int row, int row_below, int first_key) {
  const bool odd = threadIdx.x % 2;
#pragma unroll
  for (int block = 0; block < BLOCKS; block++) {
    const int key = first_key + 8 * block + int(threadIdx.x) % 4 * 2;
    const PhiloxWords drawn = dropout.draws(odd ? row_below : row, key / 4);
    const uint32_t* const word = drawn.word;
    const uint32_t kept[2] = {odd ? word[2] : word[0], odd ? word[3] : word[1]};
    const uint32_t got[2] = {__shfl_xor_sync(ALL_LANES, odd ? word[0] : word[2], 1),
                             __shfl_xor_sync(ALL_LANES, odd ? word[1] : word[3], 1)};
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if ((odd ? got[i] : kept[i]) < dropout.threshold) p[block][i] = 0.0f;
      if ((odd ? kept[i] : got[i]) < dropout.threshold) p[block][2 + i] = 0.0f;
    }
  }
}

struct RowResult {
  float factor;  // of the row's O
  float lse;
};

// What comes of a sum l of weights relative to 2^base: the learned sink (a key without a value, in natural units) is
// taken in, then the logarithm.
DEVICE RowResult finish_sum(float l, float base, float sink) {
  float correction = 1.0f;
  if constexpr (SINKS) {
    const float sink_base = sink * LOG2_E;
    if (l == 0.0f) base = -INFINITY;
    const float top = max_of(base, sink_base);
    if (top != -INFINITY) {
      correction = ptx::ex2(base - top);
      l = l * correction + ptx::ex2(sink_base - top);
      base = top;
    }
  }
  if (l == 0.0f) return {0.0f, -INFINITY};
  // The largest weight is 1, so l is no subnormal; a full division would be a call that costs registers.
  return {correction * ptx::rcp(l), (base + ptx::lg2(l)) * (1.0f / LOG2_E)};
}

// The end of a row whose sums lie in the quad.
DEVICE RowResult finish(const SoftmaxRow& row, float to_log2, float sink) {
  const float l = sum_over_quad(row.l);
  return finish_sum(l, row.m == -INFINITY ? 0.0f : row.m * to_log2, sink);
}
