// Infinities and NaN among the values, which a product with weights of 0 spreads to rows that do not see them.
//
// A row's weight of a key that it does not see is 0, and 0 * NaN is NaN. Such rows are found by their output, which is
// not finite. The quad that finds one computes that row again, key by key from global memory without the hidden keys,
// and writes it over the one in shared memory, or in the output if that has left (O_DIRECT). That is slow, but happens
// only if a value of the sequence is infinite or NaN. The main loop does nothing for it. Rolled loops make compiling it
// cheap.
#pragma once

#include "forward_sm90/output.cuh"
#include "forward_sm90/softmax.cuh"

DEVICE bool is_nonfinite(float x) { return x - x != 0.0f; }

// Whether this thread holds a piece of the row that is not finite.
template <int HALF>
DEVICE bool has_nonfinite(const Output& o) {
  float probe = 0.0f;  // stays 0 while everything is finite
#pragma unroll
  for (int i = 0; i < DIM_V / 4; i++) probe += o[register_at(HALF, i)] * 0.0f;
  return is_nonfinite(probe);
}

// A nonfinite value is added unweighted, because the weight of a key that the row sees is positive or NaN. `zero`: the
// weight is 0, so that its product with the value is NaN.
DEVICE void add_value(float& sum, bool zero, float weight, float value) {
  sum += is_nonfinite(value) && !zero ? value : weight * value;
}

struct NonfiniteRow {
  int half;        // which of the thread's two rows
  RowResult result;
  float scale;     // of all values
  uint32_t place;  // of the consumer's output in shared memory, unless O_DIRECT
};

// Each lane of the quad multiplies a quarter of the columns of Q and K.
DEVICE float dot_of_quad(const ELEMENT* q, const ELEMENT* k) {
  const uint32_t quad = 15u << lane_id() / 4 * 4;
  float dot = 0.0f;
#pragma unroll 1
  for (int i = lane_id() % 4; i < HEAD_DIM; i += 4) dot += to_real(q[i]) * to_real(k[i]);
  dot += __shfl_xor_sync(quad, dot, 1);
  return dot + __shfl_xor_sync(quad, dot, 2);
}

// Four units of 8 columns at a time, one for each lane of the quad.
DEVICE void attend_key_by_key(const Sm90Params& all, const Work& work, const Rows& rows, const NonfiniteRow& nonfinite) {
  constexpr int UNITS = HEAD_DIM_V / 8;
  const LaunchParams& params = all.params;
  const int row = rows.row(nonfinite.half);
  // A row without weights is 0 already.
  if (row >= work.seqlen_q || nonfinite.result.factor == 0.0f) return;
  const Score<float> score = make_score<float>(params, work.sequence, work.head, work.kv_head, work.mask.diagonal);
  const auto q = element_of<const ELEMENT>(params.q, params.q_strides, work.sequence, work.q_start + row, work.head);
#pragma unroll 1
  for (int unit = lane_id() % 4; unit - lane_id() % 4 < UNITS; unit += 4) {
    float sum[8] = {};
#pragma unroll 1
    for (int n = 0; n < work.keys.count() * BLOCK_N; n++) {
      const int key = work.keys.at(n / BLOCK_N) * BLOCK_N + n % BLOCK_N;
      if (!work.mask.visible(row, key)) continue;
      const KeyPlace at = place_of_key(all.schedule, work, key);
      const auto k = element_of<const ELEMENT>(params.k, params.k_strides, at.batch, at.row, work.kv_head);
      const auto v = element_of<const ELEMENT>(params.v, params.v_strides, at.batch, at.row, work.kv_head);
      const float modified = score(dot_of_quad(q, k), row, key);
      const bool kept = !DROPOUT || rows.dropout.keeps(row, key);
      const float weight = kept ? ptx::ex2((modified - nonfinite.result.largest) * LOG2_E) : 0.0f;
      const bool hidden = !kept || ((SCORE_MOD || BIAS) && modified == -INFINITY);  // unlike a weight that rounds to 0
      if (unit >= UNITS) continue;
#pragma unroll
      for (int i = 0; i < 8; i++) add_value(sum[i], hidden, weight, to_real(v[unit * 8 + i]));
    }
    if (unit >= UNITS) continue;
    const float factor = ptx::rcp(nonfinite.result.sum) * nonfinite.scale;
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      words[i] = FormatOf<OUT_ELEMENT>::pack(sum[2 * i] * factor, sum[2 * i + 1] * factor);
    }
    if constexpr (O_DIRECT) store_unit(params, work, row, unit, words);
    else ptx::store_shared_v4(OBoxes::place(nonfinite.place, (row - work.row_begin) % ROWS, unit), words);
  }
}

// Corrects the thread's rows that nonfinite values have spoiled. Their pieces `o` are in shared memory or have left.
DEVICE void mend_nonfinite(const Sm90Params& all, const Work& work, const Rows& rows, const RowResult (&results)[2],
                           const Output& o, float scale, uint32_t place) {
  const uint32_t found[2] = {__ballot_sync(ALL_LANES, has_nonfinite<0>(o)), __ballot_sync(ALL_LANES, has_nonfinite<1>(o))};
  if ((found[0] | found[1]) == 0) return;
  __syncwarp();  // other lanes wrote these rows, and what is written later stays
#pragma unroll 1
  for (int half = 0; half < 2; half++) {
    if (((half == 0 ? found[0] : found[1]) >> lane_id() / 4 * 4 & 15) == 0) continue;
    attend_key_by_key(all, work, rows, {half, half == 0 ? results[0] : results[1], scale, place});
  }
}
