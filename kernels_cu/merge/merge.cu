// Merges partial results over disjoint keys: attention over all of them.
//
//   term n     out (batch, rows, heads, columns)      lse (batch, heads, rows)      where the table `terms` says
//   thread     one group of VECTOR neighbouring columns of one row and head
//
//   m = max lse_n        w_n = e^(lse_n - m)        Z = sum w_n + e^(sink - m)        out = sum w_n out_n / Z
//
// Terms are summed in their order, and the quotient is rounded once. A row that a term saw no key of (lse = -inf) is not
// read. FlashAttention-2 (Dao, 2023), section 3.1.1.
#include "common/defaults.cuh"
#include "common/vector_rows.cuh"
#include "ptx/math.cuh"

LITTLE_ARITHMETIC

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

struct Params {
  const Term* terms;
  void* out;
  void* lse;
  const void* sinks;  // float or ELEMENT, see sinks_are_float
  Strides out_strides;
  Strides lse_strides;
  int64_t sinks_stride;
  int32_t count;  // of terms
  int32_t rows;
  int32_t heads;
  int32_t columns;
  int32_t groups;  // of VECTOR columns, the last one may be cut
  int32_t units;  // groups of all rows
  int32_t sinks_are_float;
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

// As many of VECTOR columns as there are.
DEVICE void load_columns(Real (&values)[VECTOR], const ELEMENT* from, int columns) {
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

DEVICE void store_columns(OUT_ELEMENT* to, const Real (&values)[VECTOR], int columns) {
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
    if (i < columns) to[i] = from_real(Rounded<OUT_ELEMENT>(), Accumulator<OUT_ELEMENT>(values[i]));
  }
}

// What is no number or infinite counts whole, however small its weight.
DEVICE Real add_weighted(Real sum, Real weight, Real value) {
  return value - value == Real(0) ? sum + weight * value : sum + value;
}

DEVICE Real sink_of(const Params& params, int head) {
  const int64_t at = head * params.sinks_stride;
  if (params.sinks_are_float) return Real(static_cast<const float*>(params.sinks)[at]);
  return Real(to_real(static_cast<const ELEMENT*>(params.sinks)[at]));
}

extern "C" __global__ void __launch_bounds__(THREADS) merge(const __grid_constant__ Params params) {
  const int64_t index = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= params.units) return;
  const int group = int(index) % params.groups, result = int(index) / params.groups;
  const int rows = result / params.heads;
  const Place place{rows / params.rows, rows % params.rows, result % params.heads};
  const int first = group * VECTOR, columns = params.columns - first < VECTOR ? params.columns - first : VECTOR;

  Real sink = -INFINITY;
  if constexpr (SINKS) sink = sink_of(params, place.head);
  Real top = sink;
  for (int n = 0; n < params.count; n++) top = max_of(top, lse_of(params.terms[n], place));
  if (top == -INFINITY) top = Real(0);

  Real total = Real(0), sums[VECTOR] = {};
  for (int n = 0; n < params.count; n++) {
    const Term& term = params.terms[n];
    const Real lse = lse_of(term, place);
    if (lse == -INFINITY) continue;
    const Real weight = exp_of(lse - top);
    total += weight;
    Real values[VECTOR];
    load_columns(values, place.in<const ELEMENT>(term.out, term.out_strides) + first, columns);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) sums[i] = add_weighted(sums[i], weight, values[i]);
  }
  if constexpr (SINKS) total += exp_of(sink - top);
#pragma unroll
  for (int i = 0; i < VECTOR; i++) sums[i] = total == Real(0) ? Real(0) : sums[i] / total;
  store_columns(place.in<OUT_ELEMENT>(params.out, params.out_strides) + first, sums, columns);
  if (group == 0) {
    *place.in<MergedLse>(params.lse, params.lse_strides) = MergedLse(total == Real(0) ? -INFINITY : top + log_of(total));
  }
}
