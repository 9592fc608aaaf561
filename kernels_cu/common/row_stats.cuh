// The parts of a row's softmax as outputs: its largest score, and the sum of exp(score - largest) over its keys.
//
// The LSE is largest + log(sum). A learned sink counts as a key, as it does in the LSE. A row that sees no key has -inf
// and 0. A row with a score of NaN or +inf has NaN in both, as in its LSE.
#pragma once

#include "common/params.cuh"

struct RowStats {  // null pointers: outputs that are not wanted
  float* score_max;
  float* score_sum_exp;
  Strides score_max_strides;
  Strides score_sum_exp_strides;
};

struct WithRowStats : Params {
  RowStats row_stats;
};

// Other variants pass no RowStats, so that their code does not change.
template <bool STORED>
struct ForwardParams {
  using Type = Params;
};
template <>
struct ForwardParams<true> {
  using Type = WithRowStats;
};

// row: of all rows if packed. AnyParams: LaunchParams, which has row_stats only in these variants.
template <class AnyParams>
DEVICE void store_row_stats(const AnyParams& params, int sequence, int64_t row, int head, float largest, float sum) {
  if constexpr (ROW_STATS) {
    const RowStats& to = params.row_stats;
    if (to.score_max != nullptr) {
      *element_of<float>(to.score_max, to.score_max_strides, sequence, row, head) = sum == sum ? largest : sum;
    }
    if (to.score_sum_exp != nullptr) {
      *element_of<float>(to.score_sum_exp, to.score_sum_exp_strides, sequence, row, head) = sum;
    }
  }
}
