// Merges partial results over disjoint keys: attention over all of them.
//
//   term n     out (batch, rows, heads, columns)      lse (batch, heads, rows)      where the table `terms` says
//   thread     one group of VECTOR neighbouring columns of one row and head
//
//   m = max lse_n        w_n = e^(lse_n - m)        Z = sum w_n + e^(sink - m)        out = sum w_n out_n / Z
//
// Terms are summed in their order, and the quotient is rounded once. If a term saw no key for a row (lse = -inf), that
// row is not read. FlashAttention-2 (Dao, 2023), section 3.1.1.
#include "common/defaults.cuh"
#include "merge/terms.cuh"

LITTLE_ARITHMETIC

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
