// The end of a piece: a lane's sums of its two rows go to the output or to a slot of the partial results.
#pragma once

#include "decode/pieces.cuh"
#include "decode_sm90/softmax.cuh"

template <class Half>
DEVICE void store_pair(Half* to, float low, float high) {
  const uint32_t word = pack_outputs(Half(), low, high);
  if (reinterpret_cast<uint64_t>(to) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(to) = word;
  } else {
    to[0].bits = uint16_t(word);
    to[1].bits = uint16_t(word >> 16);
  }
}
DEVICE void store_pair(float* to, float low, float high) {
  to[0] = low;
  to[1] = high;
}

// Columns 8j + 2t and the next, t = lane % 4. weighted: whether the row has weights, else it is 0. factor: of all.
template <class Element>
DEVICE void store_row(Element* to, const Output& o, int half, bool weighted, float factor) {
#pragma unroll
  for (int j = 0; j < HEAD_DIM_V / 8; j++) {
    const float low = o[4 * j + 2 * half], high = o[4 * j + 2 * half + 1];
    store_pair(to + 8 * j + lane_column(), weighted ? low * factor : 0.0f, weighted ? high * factor : 0.0f);
  }
}

// first: the lane's first packed row of the tile. slot: of the partial results, or -1 for the output.
DEVICE void store_rows(const DecodeParams& params, const Entry& entry, int kv_head, int slot, int first, const Output& o,
                       const SoftmaxRow (&softmax)[2], const Exponents& exponents) {
  const Params& attention = params.attention;
  float out_scale = 1.0f;
  if constexpr (DESCALES) {
    out_scale = descale(attention.v_descale, attention.v_descale_strides, entry.sequence, kv_head);
  }
  const float sums[2] = {sum_over_quad(softmax[0].l), sum_over_quad(softmax[1].l)};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = first + 8 * half, packed = entry.packed_begin + row;
    if (packed >= entry.packed_end) continue;
    float unit;
    const RowSum sum = row_sum(softmax[half].m, sums[half], exponents, unit);
    if (slot >= 0) {
      const int64_t place = int64_t(slot) * BLOCK_M + row;
      store_row(params.partial_out + place * HEAD_DIM_V, o, half, sum.sum != 0.0f, ptx::rcp(sums[half]) * out_scale);
      if (lane_id() % 4 == 0) partial_sums(params)[place] = sum;
      continue;
    }
    const OutputRow to = output_row(params, entry, kv_head, packed);
    float sink = -INFINITY;
    if constexpr (SINKS) sink = sink_logit(attention, to.head);
    const RowResult result = finish_sum(sum, sink);
    store_row(to.out, o, half, result.factor != 0.0f, result.factor * unit * out_scale);
    if (LSE && lane_id() % 4 == 0) *to.lse = result.lse;
  }
}
