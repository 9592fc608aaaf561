// The parameters of a launch of a forward kernel (Params). common/defaults.cuh has its compile-time options.
//
// gpu_actors/kernels/params.py reads the structs from this text: one field a line, of a type that it knows.
// The innermost dimension of an operand (head_dim, or the keys of bias) is contiguous.
#pragma once

#include "common/defaults.cuh"
#include "common/types.cuh"

#ifndef HEAD_DIM
#error "HEAD_DIM, HEAD_DIM_V, BLOCK_M, BLOCK_N, WARPS, SHARED_BYTES, ELEMENT, KV_ELEMENT and OUT_ELEMENT must be given"
#endif

struct Strides {  // in elements; 0 for a dimension that is broadcast or that the operand lacks
  int64_t batch;
  int64_t row;
  int64_t head;
};

struct Params {  // pointers to operands that the variant does not use are null
  const void* q;
  const void* k;
  const void* v;
  void* out;
  void* lse;  // LseElement
  const void* bias;
  const float* alibi_slopes;
  const void* sinks;  // float or OUT_ELEMENT, see sinks_are_float
  const float* q_descale;  // null stands for factors of 1, as in the next two
  const float* k_descale;
  const float* v_descale;
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;
  Strides q_strides;
  Strides k_strides;
  Strides v_strides;
  Strides out_strides;
  Strides lse_strides;
  Strides bias_strides;
  Strides alibi_slopes_strides;
  Strides sinks_strides;
  Strides q_descale_strides;
  Strides k_descale_strides;
  Strides v_descale_strides;
  double softmax_scale;
  double softcap;
  double dropout_scale;  // 1 / (1 - p), so 1 without dropout
  uint64_t dropout_seed;
  uint32_t dropout_threshold;
  int32_t heads_q;
  int32_t heads_kv;
  int32_t seqlen_q;  // of the longest sequence if VARLEN, like seqlen_k
  int32_t seqlen_k;
  int32_t window_left;
  int32_t window_right;
  int32_t sink_tokens;
  int32_t sinks_are_float;
  int32_t q_position_words;  // of a sequence: 1, its first position, or 2, with the step; like k_position_words
  int32_t k_position_words;
  int32_t dropout_first_head;  // the first head's number among dropout_heads
  int32_t dropout_heads;
  int32_t attention_chunk;  // keys of a chunk
  const int32_t* q_positions;  // null: from 0 on, one apart
  const int32_t* k_positions;
};

template <bool WIDE>
struct LseOf {
  using Type = float;
};
template <>
struct LseOf<true> {
  using Type = double;
};
using LseElement = LseOf<WIDE_LSE>::Type;

// An operand's element, or the first one of its row. Packed tensors have no batch stride; `row` counts all rows then.
template <class Element, class Pointer>
DEVICE Element* element_of(Pointer operand, const Strides& strides, int sequence, int64_t row, int head) {
  return static_cast<Element*>(operand) + sequence * strides.batch + row * strides.row + head * strides.head;
}

DEVICE float descale(const float* factors, const Strides& strides, int sequence, int kv_head) {
  return factors == nullptr ? 1.0f : *element_of<const float>(factors, strides, sequence, 0, kv_head);
}

// The learned sink of a head: a logit that joins the softmax's denominator and has no value.
DEVICE auto sink_logit(const Params& params, int head) -> decltype(to_real(OUT_ELEMENT())) {
  if (params.sinks_are_float) return *element_of<const float>(params.sinks, params.sinks_strides, 0, 0, head);
  return to_real(*element_of<const OUT_ELEMENT>(params.sinks, params.sinks_strides, 0, 0, head));
}

// A value rounded to the BITS significant bits of an operand.
template <int BITS>
DEVICE float round_operand(float x) {
  if constexpr (!TIES_AWAY) return round_significand<BITS>(x);
  const uint32_t bits = ptx::as_bits(x), half = 1u << (23 - BITS);
  return (bits & 0x7f800000u) == 0x7f800000u ? x : ptx::as_float((bits + half) & ~(2 * half - 1));
}
template <int BITS>
DEVICE double round_operand(double x) {
  return round_significand<BITS>(x);
}
