// What the merge of partial results and its gradient share: where partials lie, and how their rows are read.
#pragma once

#include "common/vector_rows.cuh"
#include "ptx/math.cuh"

#if !defined(WARPS) || !defined(ELEMENT) || !defined(OUT_ELEMENT) || !defined(LSE_ELEMENT)
#error "WARPS, ELEMENT, OUT_ELEMENT and LSE_ELEMENT must be given"
#endif

constexpr int THREADS = WARPS * 32;
constexpr bool WIDE = sizeof(ELEMENT) == 8 || sizeof(OUT_ELEMENT) == 8;  // not moved 16 bytes at a time
constexpr int VECTOR = WIDE ? 2 : vector_length<ELEMENT, OUT_ELEMENT>();

struct Strides {  // in elements; packed rows have no batch
  int64_t batch;
  int64_t row;
  int64_t head;
};

struct Term {
  const void* out;
  const void* lse;
  Strides out_strides;
  Strides lse_strides;
};

using Real = decltype(Accumulator<ELEMENT>() + Accumulator<OUT_ELEMENT>() + LSE_ELEMENT());
using MergedLse = decltype(Accumulator<OUT_ELEMENT>() + LSE_ELEMENT());

struct Place {
  int sequence, row, head;

  template <class Element, class Pointer>
  __device__ __forceinline__ Element* in(Pointer operand, const Strides& strides) const {
    return static_cast<Element*>(operand) + sequence * strides.batch + row * strides.row + head * strides.head;
  }
};

DEVICE Real lse_of(const Term& term, const Place& place) {
  return Real(*place.in<const LSE_ELEMENT>(term.lse, term.lse_strides));
}

// Loads up to VECTOR columns; missing ones are 0.
template <class Element>
DEVICE void load_columns(Real (&values)[VECTOR], const Element* from, int columns) {
  if constexpr (!WIDE) {
    if (columns == VECTOR && is_aligned(from)) {
      float loaded[VECTOR];
      load_elements(loaded, from);
#pragma unroll
      for (int i = 0; i < VECTOR; i++) values[i] = loaded[i];
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < VECTOR; i++) values[i] = i < columns ? Real(to_real(from[i])) : Real(0);
}

template <class Element>
DEVICE void store_columns(Element* to, const Real (&values)[VECTOR], int columns) {
  if constexpr (!WIDE) {
    if (columns == VECTOR && is_aligned(to)) {
      float rounded_once[VECTOR];
#pragma unroll
      for (int i = 0; i < VECTOR; i++) rounded_once[i] = float(values[i]);
      store_elements(to, rounded_once, 1.0f);
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < VECTOR; i++) {
    if (i < columns) to[i] = from_real(Rounded<Element>(), Accumulator<Element>(values[i]));
  }
}

// A NaN or an infinity is added unweighted, however small its weight.
DEVICE Real add_weighted(Real sum, Real weight, Real value) {
  return value - value == Real(0) ? sum + weight * value : sum + value;
}

template <class AnyParams>
DEVICE Real sink_of(const AnyParams& params, int head) {
  const int64_t at = head * params.sinks_stride;
  if (params.sinks_are_float) return Real(static_cast<const float*>(params.sinks)[at]);
  return Real(to_real(static_cast<const ELEMENT*>(params.sinks)[at]));
}
