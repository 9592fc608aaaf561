// Infinities and NaN among the values, which a product with weights of 0 spreads to rows that do not see them.
//
// A row's weight of a key that it does not see is 0, and 0 * NaN is NaN. Such rows show: their output is not finite.
// The quad that finds one computes that row again, key by key from global memory, in which hidden keys have no part.
// That is slow, and happens only where a value of the sequence is infinite or NaN; the main loop knows nothing of it.
#pragma once

#include "sm90_schedule.cuh"
#include "sm90_softmax.cuh"

DEVICE bool is_special(float x) { return x - x != 0.0f; }

// Whether this thread holds a piece of the row that is not finite.
template <int HALF>
DEVICE bool has_special(const Output& o) {
  float probe = 0.0f;  // stays 0 while everything is finite
#pragma unroll
  for (int i = 0; i < DIM_V / 4; i++) probe += o[i / 2 * 4 + 2 * HALF + i % 2] * 0.0f;
  return is_special(probe);
}

// A special value counts whole, whatever the weight of a key that the row sees: the weight is positive, if it is no
// NaN.
DEVICE void add_value(float& sum, float weight, float value) { sum += is_special(value) ? value : weight * value; }

template <int HALF>
DEVICE void attend_key_by_key(const Sm90Params& all, const Work& work, const Rows& rows, const SoftmaxRow& softmax,
                              Output& o) {
  const LaunchParams& params = all.params;
#pragma unroll
  for (int i = 0; i < DIM_V / 4; i++) o[i / 2 * 4 + 2 * HALF + i % 2] = 0.0f;
  const int row = rows.row(HALF);
  if (row >= work.seqlen_q) return;
  const float base = base_of(softmax.m, rows.to_log2);
  const Score<float> score = make_score<float>(params, work.sequence, work.head, work.kv_head, work.mask.diagonal);
  const auto q = element_of<const ELEMENT>(params.q, params.q_strides, work.sequence, work.q_start + row, work.head);
#pragma unroll 1
  for (int n = 0; n < work.keys.count() * BLOCK_N; n++) {
    const int key = work.keys.at(n / BLOCK_N) * BLOCK_N + n % BLOCK_N;
    if (!work.mask.visible(row, key)) continue;
    const KeyPlace at = place_of_key(all.schedule, work, key);
    const auto k = element_of<const ELEMENT>(params.k, params.k_strides, at.batch, at.row, work.kv_head);
    const auto v = element_of<const ELEMENT>(params.v, params.v_strides, at.batch, at.row, work.kv_head);
    float dot = 0.0f;
#pragma unroll 1
    for (int i = 0; i < HEAD_DIM; i++) dot += to_real(q[i]) * to_real(k[i]);
    const float weight = ptx::ex2(score(dot, row, key) * LOG2_E - base);
#pragma unroll
    for (int i = 0; i < DIM_V / 4; i++) {
      const int column = i / 2 * 8 + lane_id() % 4 * 2 + i % 2;
      if (column < HEAD_DIM_V) add_value(o[i / 2 * 4 + 2 * HALF + i % 2], weight, to_real(v[column]));
    }
  }
}

template <int HALF>
DEVICE void mend_row(const Sm90Params& all, const Work& work, const Rows& rows, const SoftmaxRow& softmax, Output& o) {
  const uint32_t special = __ballot_sync(ALL_LANES, has_special<HALF>(o));
  if ((special >> lane_id() / 4 * 4 & 15) != 0) attend_key_by_key<HALF>(all, work, rows, softmax, o);
}

// Puts right what special values have done to the thread's rows.
DEVICE void mend_special(const Sm90Params& all, const Work& work, const Rows& rows, const SoftmaxRow (&softmax)[2],
                         Output& o) {
  mend_row<0>(all, work, rows, softmax[0], o);
  mend_row<1>(all, work, rows, softmax[1], o);
}
