// Online softmax over the scores as mma.sync leaves them (Dao, arXiv 2307.08691, algorithm 1; Milakov, arXiv
// 1805.02867).
//
//            S of a warp: 16 rows, BLOCK_N keys in blocks of 8
//              lanes 4g .. 4g + 3:    t=0   t=1   t=2   t=3   t=0 ..
//     row g        s[block][0..1]   | s s | s s | s s | s s | s s ..     the four lanes of a quad own rows g and g + 8
//     row g + 8    s[block][2..3]   | s s | s s | s s | s s | s s ..     together: they share the rows' maxima
//
// Weights are 2^(s * factor - base), base = maximum * factor: one multiply-add and one ex2 each. The factor is to_log2.
// If only the scale lies between the product and the score, to_log2 includes it and the maxima are those of the plain
// products.
//
// A base is rounded to a float of its own. Earlier sums are multiplied by 2^(last base - base), which is exactly 1 if
// the maximum stays. If either base were a product that the compiler may fuse into that difference, the correction
// would be 2^(rounding error), an error for each tile of keys.
//
// Far maxima, such as those of keys that a mask of float's lowest number hides: s * to_log2 is not rounded and its base
// is, so the largest weight is 2^(rounding error), which is nearly 1. Far from 0 it is anything from 0 to infinity, and
// the base itself may overflow. So there the factor is a power of two, whose products are exact. It amounts to another
// base of the exponential, which changes no result: neighbouring floats lie so far apart that a weight is 1 or almost
// 0.
//
// A power above to_log2 keeps bases in the order of their maxima. But it overflows times float's lowest number, which a
// mask may add to all of a row's scores. So if LOW_SCORES, the power is below to_log2, and the last base is computed
// again with the new factor.
#pragma once

#include "common/params.cuh"
#include "common/philox.cuh"
#include "common/score.cuh"

// Descales may be 0 or negative, for which maxima of plain products are wrong.
constexpr bool SCALE_ONLY = !SOFTCAP && !ALIBI && !BIAS && !SCORE_MOD && !DESCALES;
constexpr bool LOW_SCORES = ALIBI || SCORE_MOD || (BIAS && !BIAS_HIDES);
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr float LOWEST = -0x1.fffffep127f;
constexpr uint32_t ALL_LANES = 0xffffffffu;

// The largest weight of a row is 2^WEIGHT_EXPONENT. With 1, weights would leave the upper half of e4m3's range, 2^-9 to
// 448, unused, and those below 2^-10 would be 0.
constexpr bool NARROW_WEIGHTS = sizeof(ELEMENT) == 1;
constexpr float WEIGHT_EXPONENT = NARROW_WEIGHTS ? 8.0f : 0.0f;
// 2^23 and 2^27. Rounding takes 2^-24 off a base at most: weights stay within their type's range.
constexpr uint32_t FAR_BITS = (NARROW_WEIGHTS ? 23u + 127u : 27u + 127u) << 23;

constexpr float STEEP = 0x1p95f;

// From scores, or the products that stand for them, to exponents of 2.
struct Exponents {
  float scale;  // of products; 1 of scores
  float steep;  // and this, if a slope of ALiBi that was cut off leads to STEEP scores
  float to_log2;
  float power;   // of two, next to to_log2
  float far;     // maxima of a greater magnitude have `power` as their factor
  float lowest;  // the maximum of no scores: its base is finite

  __device__ __forceinline__ float factor(float m) const { return fabsf(m) > far ? power : to_log2; }
  __device__ __forceinline__ float base(float m, float factor) const {
    return NARROW_WEIGHTS ? fmaf(m, factor, -WEIGHT_EXPONENT) : __fmul_rn(m, factor);
  }
};

// scale: above 0. If it is not finite, any weights will do, because `row_sum` makes NaN of them.
DEVICE Exponents exponents_of(float scale) {
  const float to_log2 = DESCALES && scale - scale != 0.0f ? 1.0f : scale * LOG2_E;
  constexpr uint32_t ONE = 127u << 23, GREATEST = 253u << 23;  // the bits of 1 and 2^126
  uint32_t power = (ptx::as_bits(to_log2) + (LOW_SCORES ? 0 : 0x7fffffu)) & 0x7f800000u;
  if (power > GREATEST) power = GREATEST;
  const float lowest = LOWEST * (power > ONE ? ptx::as_float(2 * ONE - power) : 1.0f);
  return {scale, 1.0f, to_log2, ptx::as_float(power), ptx::as_float(ONE + FAR_BITS - power), lowest};
}

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
  float m;         // running maximum of the scores, the same in all lanes of the quad
  float base;      // of m
  float l = 0.0f;  // running sum of the weights of this lane's keys

  // Updates the maximum with the largest of a lane's new scores, which are the row's first if FIRST. From then on
  // weights are 2^(s * factor - the returned base), and earlier sums must be multiplied by `correction`.
  template <bool FIRST = false>
  __device__ __forceinline__ float raise(float largest, const Exponents& exponents, float& factor, float& correction) {
    const float last = m;
    m = max_of(m, max_over_quad(largest));
    factor = exponents.factor(m);
    const float before = LOW_SCORES ? exponents.base(last, factor) : base;
    base = exponents.base(m, factor);
    if (!FIRST) {
      correction = ptx::ex2(before - base);
      l *= correction;
    }
    return base;
  }
};

// Rows that have seen no key.
DEVICE void start(SoftmaxRow (&rows)[2], const Exponents& exponents) {
  rows[0].m = rows[1].m = exponents.lowest;
  rows[0].base = rows[1].base = exponents.base(exponents.lowest, exponents.factor(exponents.lowest));
}

// Drops weights of rows `row` and `row_below` (8 further), keys first_key + 8 * block + 2t and the next. Philox draws
// for four keys at a time, which two lanes share: each draws for one of the rows and passes half of the words on.
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

// The sum of a row's e^score, as sum * e^top. Without keys 0 and -inf.
struct RowSum {
  float top, sum;
};

// From weights whose maximum is m and whose sum is l. unit: what a weight of 1 is of e^top.
DEVICE RowSum row_sum(float m, float l, const Exponents& exponents, float& unit) {
  const float factor = exponents.factor(m);
  unit = ptx::ex2(fmaf(-m, factor, exponents.base(m, factor)));
  if (l == 0.0f && m == exponents.lowest) return {-INFINITY, 0.0f};
  const float scale = exponents.scale * (ALIBI && fabsf(m) > 0.5f * STEEP ? exponents.steep : 1.0f);
  return {m * scale, DESCALES ? fmaf(scale, 0.0f, l * unit) : l * unit};  // NaN if the scale is not finite
}

struct RowResult {
  float factor;  // of the row's O
  float lse;
  float largest, sum;  // lse = largest + log(sum), see common/row_stats.cuh
};

// The results of a row, the learned sink included, which is a key without a value. Differences come before products,
// which may overflow.
DEVICE RowResult finish_sum(const RowSum& row, float sink) {
  float correction = 1.0f, top = row.top, sum = row.sum;
  if constexpr (SINKS) {
    top = max_of(top, sink);
    if (top != -INFINITY) {
      correction = ptx::ex2((row.top - top) * LOG2_E);
      sum = sum * correction + ptx::ex2((sink - top) * LOG2_E);
    }
  }
  if (sum == 0.0f) return {0.0f, -INFINITY, -INFINITY, 0.0f};
  // The largest weight is 1, so the sum is no subnormal; a full division would be a call that costs registers.
  return {correction * ptx::rcp(sum), fmaf(ptx::lg2(sum), LN_2, top), top, sum};
}

// The end of a row whose sums lie in the quad.
DEVICE RowResult finish(const SoftmaxRow& row, const Exponents& exponents, float sink) {
  float unit;
  const RowSum sum = row_sum(row.m, sum_over_quad(row.l), exponents, unit);
  RowResult result = finish_sum(sum, sink);
  result.factor *= unit;
  return result;
}
