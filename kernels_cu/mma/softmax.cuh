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
//
// A base is a number of its own, rounded: what was summed relative to the last one is multiplied by 2^(last - base),
// which is 1 exactly where the maximum stays. Were either of them a product that the compiler may fuse into that
// difference, the factor would be 2^(what rounding took off), and an error of it for each tile of keys.
#pragma once

#include "common/params.cuh"
#include "common/philox.cuh"
#include "common/score.cuh"

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
  float m = -INFINITY;     // running maximum of the scores, the same in all lanes of the quad
  float base = -INFINITY;  // 2^base is what the summed weights are relative to; -inf for a row that has seen no key
  float l = 0.0f;          // running sum of the weights of this lane's keys

  // Takes the largest of a lane's new scores in, which are the row's first if FIRST. Weights are relative to 2^(what it
  // returns) from here on, 2^exponent for the largest; what was summed before is to be multiplied by `correction`.
  template <bool FIRST = false>
  __device__ __forceinline__ float raise(float largest, float to_log2, float& correction, float exponent = 0.0f) {
    const float before = base;
    m = FIRST ? max_over_quad(largest) : max_of(m, max_over_quad(largest));
    base = __fmul_rn(m, to_log2) - exponent;
    const float finite = m == -INFINITY ? 0.0f : base;
    if (!FIRST) {
      correction = ptx::ex2(before - finite);
      l *= correction;
    }
    return finite;
  }
};

// Drops weights of rows `row` and `row_below` (8 further), keys first_key + 8 * block + 2t and the next. Philox draws
// for four keys at a time, which two lanes share: each draws for one of the rows and hands half of the words over.
template <int BLOCKS>
DEVICE void drop(const Dropout& dropout, float (&p)[BLOCKS][4], int row, int row_below, int first_key) {
#if POSITIONS
  // Neighbouring keys need not share a draw, so each takes its own. Rolled, to keep the code small.
#pragma unroll
  for (int block = 0; block < BLOCKS; block++) {
    uint32_t kept = 0;
#pragma unroll 1
    for (int i = 0; i < 4; i++) {
      const int key = first_key + 8 * block + int(threadIdx.x) % 4 * 2 + i % 2;
      kept |= uint32_t(dropout.keeps(i < 2 ? row : row_below, key)) << i;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (!(kept >> i & 1)) p[block][i] = 0.0f;
    }
  }
#else
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
#endif
}

// The same draws for one block, as bits: the thread's weights e of block `key`, 0 and 1 of `row`, 2 and 3 of `row_below`.
// key: the thread's first one.
DEVICE uint32_t kept_in_block(const Dropout& dropout, int row, int row_below, int key) {
  uint32_t kept = 0;
#if POSITIONS
#pragma unroll 1
  for (int i = 0; i < 4; i++) kept |= uint32_t(dropout.keeps(i < 2 ? row : row_below, key + i % 2)) << i;
#else
  const bool odd = threadIdx.x % 2;
  const PhiloxWords drawn = dropout.draws(odd ? row_below : row, key / 4);
  const uint32_t* const word = drawn.word;
  const uint32_t own[2] = {odd ? word[2] : word[0], odd ? word[3] : word[1]};
  const uint32_t got[2] = {__shfl_xor_sync(ALL_LANES, odd ? word[0] : word[2], 1),
                           __shfl_xor_sync(ALL_LANES, odd ? word[1] : word[3], 1)};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    kept |= uint32_t((odd ? got[i] : own[i]) >= dropout.threshold) << i;
    kept |= uint32_t((odd ? own[i] : got[i]) >= dropout.threshold) << (2 + i);
  }
#endif
  return kept;
}

struct RowResult {
  float factor;  // of the row's O
  float lse;
  float largest, sum;  // lse = largest + log(sum), see common/row_stats.cuh
};

// What comes of a sum l of weights relative to 2^base: the learned sink (a key without a value, in natural units) is
// taken in, then the logarithm. exponent: in base 2, of the largest weight.
DEVICE RowResult finish_sum(float l, float base, float sink, float exponent = 0.0f) {
  float correction = 1.0f, largest = base + exponent;
  if constexpr (SINKS) {
    const float sink_base = __fmul_rn(sink, LOG2_E);
    if (l == 0.0f) base = largest = -INFINITY;
    largest = max_of(largest, sink_base);
    const float top = max_of(base, sink_base);
    if (top != -INFINITY) {
      correction = ptx::ex2(base - top);
      l = l * correction + ptx::ex2(sink_base - top);
      base = top;
    }
  }
  if (l == 0.0f) return {0.0f, -INFINITY, -INFINITY, 0.0f};
  const float sum = exponent == 0.0f ? l : l * ptx::ex2(base - largest);
  // The largest weight is 1, so l is no subnormal; a full division would be a call that costs registers.
  return {correction * ptx::rcp(l), (base + ptx::lg2(l)) * (1.0f / LOG2_E), largest * (1.0f / LOG2_E), sum};
}

// The end of a row whose sums lie in the quad. exponent: as `raise` was given it.
DEVICE RowResult finish(const SoftmaxRow& row, float sink, float exponent = 0.0f) {
  return finish_sum(sum_over_quad(row.l), row.base, sink, exponent);
}
