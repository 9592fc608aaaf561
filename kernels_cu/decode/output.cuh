// From sums to results: eight or four neighbouring elements of a packed row at a time, in any thread's registers.
#pragma once

#include "decode/plan.cuh"
#include "mma/softmax.cuh"
#include "ptx/memory.cuh"
#include "ptx/pack.cuh"

// acc + weight * value. A NaN or an infinity is added unweighted, however small its weight.
template <class Real>
DEVICE Real add_weighted(Real acc, Real weight, Real value) {
  return value - value == 0 ? acc + weight * value : acc + value;
}

// For the rows of every head.
DEVICE Exponents exponents_of(const Params& attention) {
  return exponents_of(SCALE_ONLY ? static_cast<float>(attention.softmax_scale) : 1.0f);
}

DEVICE RowSum* partial_sums(const DecodeParams& params) { return reinterpret_cast<RowSum*>(params.partial_sums); }

// Where a packed row of an entry lies in the output.
struct OutputRow {
  OUT_ELEMENT* out;
  float* lse;
  int head;
};

DEVICE OutputRow output_row(const DecodeParams& params, const Entry& entry, int kv_head, int packed) {
  const Params& attention = params.attention;
  const int ratio = heads_a_group(params), row = packed / ratio, head = kv_head * ratio + packed % ratio;
  const int64_t place = entry.lengths.q_start + row;
  return {element_of<OUT_ELEMENT>(attention.out, attention.out_strides, entry.sequence, place, head),
          LSE ? element_of<float>(attention.lse, attention.lse_strides, entry.sequence, place, head) : nullptr, head};
}

DEVICE uint32_t pack_outputs(half_t, float low, float high) { return ptx::pack_half(low, high); }
DEVICE uint32_t pack_outputs(bfloat16_t, float low, float high) { return ptx::pack_bfloat16(low, high); }

// Stores COUNT neighbours, in wide stores if they are aligned.
template <class Half, int COUNT>
DEVICE void store_neighbours(Half* out, const float (&values)[COUNT]) {
  uint32_t words[COUNT / 2];
#pragma unroll
  for (int w = 0; w < COUNT / 2; w++) words[w] = pack_outputs(Half(), values[2 * w], values[2 * w + 1]);
  if (reinterpret_cast<uint64_t>(out) % (2 * COUNT) == 0) {
    if constexpr (COUNT == 8) ptx::store_global_v4(out, words);
    else *reinterpret_cast<uint64_t*>(out) = uint64_t(words[1]) << 32 | words[0];
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; i++) out[i].bits = uint16_t(words[i / 2] >> (i % 2 * 16));
  }
}

template <int COUNT>
DEVICE void store_neighbours(float* out, const float (&values)[COUNT]) {
  const bool wide = reinterpret_cast<uint64_t>(out) % 16 == 0;
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
    const uint32_t words[4] = {ptx::as_bits(values[i]), ptx::as_bits(values[i + 1]), ptx::as_bits(values[i + 2]),
                               ptx::as_bits(values[i + 3])};
    if (wide) {
      ptx::store_global_v4(out + i, words);
    } else {
#pragma unroll
      for (int k = 0; k < 4; k++) out[i + k] = values[i + k];
    }
  }
}

template <class Half>
DEVICE void store_nan(Half& out) {
  out.bits = 0x7fff;  // in both 16-bit formats
}
DEVICE void store_nan(float& out) { out = ptx::as_float(0x7fffffffu); }
DEVICE void store_nan(double& out) { out = ptx::as_float(0x7fffffffu); }

// Writes NaN to rows whose lengths contradict what the launch was prepared for. packed_end: where the rows to be
// written end. WRITERS: the number of threads that call it, the block's first.
template <int WRITERS>
DEVICE void write_broken(const DecodeParams& params, const Entry& entry, int kv_head, int64_t packed_end) {
  const int64_t all = (packed_end - entry.packed_begin) * HEAD_DIM_V;
  for (int64_t index = threadIdx.x; index < all; index += WRITERS) {
    const int packed = entry.packed_begin + int(index / HEAD_DIM_V), column = int(index % HEAD_DIM_V);
    const OutputRow to = output_row(params, entry, kv_head, packed);
    store_nan(to.out[column]);
    if (LSE && column == 0) *to.lse = ptx::as_float(0x7fffffffu);
  }
}
