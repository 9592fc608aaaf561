// From a dot product to the score that enters the softmax: scale, a graph's own modification, softcap, ALiBi, bias, in
// this order.
#pragma once

#include "common/positions.cuh"
#include "common/row_stats.cuh"
#include "ptx/math.cuh"
#include "common/score_mod.cuh"

using LaunchParams = WithScoreMod<ForwardParams<ROW_STATS>::Type>;

DEVICE int alibi_distance(int before) { return ALIBI_SIGNED ? before : abs(before); }

// A score with its element of the bias.
template <class Real, class Element>
DEVICE Real biased(Real score, Element bias) {
  if constexpr (BIAS_HIDES) return bias ? score : Real(-INFINITY);
  else return score + Real(to_real(bias));
}

template <class Real>
struct Score {
  Real scale;                // softmax_scale, times q's and k's descales
  Real softcap;              // c of c * tanh(s / c)
  Real slope;                // ALiBi's slope of this head (arXiv 2108.12409)
  int diagonal;              // as in Mask: ALiBi measures the distance from it
  const BIAS_ELEMENT* bias;  // of this sequence and head
  int64_t bias_row_stride;
  ScoreMod mod;
#if POSITIONS
  Positions positions;
#endif

  __device__ __forceinline__ Real operator()(Real dot, int row, int key) const {
    Real score = dot * scale;
    if constexpr (SCORE_MOD) score = mod(score, row, key);
    if constexpr (SOFTCAP) score = softcap * tanh_of(score / softcap);
#if POSITIONS
    if constexpr (ALIBI) score -= slope * Real(alibi_distance(positions.row(row) - positions.key(key)));
#else
    if constexpr (ALIBI) score -= slope * Real(alibi_distance(row + diagonal - key));
#endif
    if constexpr (BIAS) score = biased(score, bias[row * bias_row_stride + key]);
    return score;
  }
};

// Everything but the modification, whose operands follow the kernel's parameters.
template <class Real, class AnyParams>
DEVICE Score<Real> make_unmodified_score(const AnyParams& params, int sequence, int head, int kv_head, int diagonal) {
  Score<Real> score{Real(params.softmax_scale), Real(params.softcap), Real(0), diagonal, nullptr, 0, {}};
  if constexpr (DESCALES) {
    // In double: the product of a tiny scale and large descales may fit into Real although they do not.
    double scale = params.softmax_scale;
    scale *= descale(params.q_descale, params.q_descale_strides, sequence, kv_head);
    scale *= descale(params.k_descale, params.k_descale_strides, sequence, kv_head);
    score.scale = Real(scale);
  }
  if constexpr (ALIBI) {
    score.slope = *element_of<const float>(params.alibi_slopes, params.alibi_slopes_strides, sequence, 0, head);
  }
#if POSITIONS
  score.positions = positions_of(params, sequence);
#endif
  if constexpr (BIAS) {
    score.bias = element_of<const BIAS_ELEMENT>(params.bias, params.bias_strides, sequence, 0, head);
    score.bias_row_stride = params.bias_strides.row;
  }
  return score;
}

// AnyParams: LaunchParams, or the Params of a kernel that has no place for a score modification.
template <class Real, class AnyParams>
DEVICE Score<Real> make_score(const AnyParams& params, int sequence, int head, int kv_head, int diagonal) {
  Score<Real> score = make_unmodified_score<Real>(params, sequence, head, kv_head, diagonal);
  if constexpr (SCORE_MOD) score.mod = bind_score_mod(params.score_params(), sequence, head);
  return score;
}
