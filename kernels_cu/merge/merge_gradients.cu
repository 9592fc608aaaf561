// The gradient of the merge of partial results with respect to each partial's out and lse, and to the learned sinks.
//
//   term n     out and dout (batch, rows, heads, columns)      lse and dlse (batch, heads, rows)
//   thread     some groups of VECTOR columns of one row and head, which `lanes` neighbouring threads of a warp share
//
//   a_n = e^(lse_n - m) / Z        taken = sum a_n (dout . out_n) - dlse
//   dout_n = a_n dout              dlse_n = a_n (dout . out_n - taken)              dsink = - sum over rows of a_sink taken
//
// A sink is a term whose out is 0. Terms are summed in their order and each gradient is rounded once; the rows of a sink are
// summed by a second launch, SUM_SINKS, a block a head. Derived from the merge: FlashAttention-2 (Dao, 2023), section 3.1.1.
#include "common/defaults.cuh"
#include "merge/terms.cuh"

LITTLE_ARITHMETIC

struct GradientTerm {
  Term seen;
  void* dout;  // without gaps, like dlse
  void* dlse;
};

struct GradientParams {
  const GradientTerm* terms;
  const void* dout;
  const void* dlse;  // null: 0
  const void* sinks;  // float or ELEMENT, see sinks_are_float
  void* sink_parts;  // of each head, rows of all sequences
  float* dsinks;
  Strides dout_strides;
  Strides dlse_strides;
  int64_t sinks_stride;
  int32_t count;  // of terms
  int32_t rows;
  int32_t heads;
  int32_t columns;
  int32_t results;  // rows of all heads and sequences
  int32_t lanes;  // a power of 2, at most 32
  int32_t sinks_are_float;
};

// Whether dout . out_n can wait in the place of dlse_n until the sums over all terms are known. Else it is computed twice.
constexpr bool KEPT = sizeof(LSE_ELEMENT) == sizeof(Real);

struct Row {
  Place place;
  int lane;
  int lanes;
  int columns;

  __device__ __forceinline__ int group(int first) const { return columns - first < VECTOR ? columns - first : VECTOR; }

  // All threads of a warp call this together. It sums the lanes of each of its rows.
  __device__ __forceinline__ Real dot(const OUT_ELEMENT* dout, const ELEMENT* out) const {
    Real sum = Real(0);
    for (int first = lane * VECTOR; out != nullptr && first < columns; first += lanes * VECTOR) {
      Real left[VECTOR], right[VECTOR];
      load_columns(left, dout + first, group(first));
      load_columns(right, out + first, group(first));
#pragma unroll
      for (int i = 0; i < VECTOR; i++) sum += left[i] * right[i];
    }
    for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return sum;
  }
};

// dout . out_n, or 0 if the row saw no key of term n, whose out is not read then.
DEVICE Real gain_of(const Row& row, const Term& term, const OUT_ELEMENT* dout) {
  const bool seen = lse_of(term, row.place) != -INFINITY;
  return row.dot(dout, seen ? row.place.in<const ELEMENT>(term.out, term.out_strides) : nullptr);
}

DEVICE void sum_sinks(const GradientParams& params) {
  __shared__ Real partial[THREADS];
  const int count = params.results / params.heads;
  const Real* parts = static_cast<const Real*>(params.sink_parts) + int64_t(blockIdx.x) * count;
  Real sum = Real(0);
  for (int part = threadIdx.x; part < count; part += THREADS) sum += parts[part];
  partial[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int thread = 1; thread < THREADS; thread++) sum += partial[thread];
  params.dsinks[blockIdx.x] = float(sum);
}

extern "C" __global__ void __launch_bounds__(THREADS) merge_gradients(const __grid_constant__ GradientParams params) {
  if constexpr (SUM_SINKS) {
    sum_sinks(params);
    return;
  }
  const int64_t index = (int64_t(blockIdx.x) * THREADS + threadIdx.x) / params.lanes;
  const bool stores = index < params.results;
  const int result = stores ? int(index) : params.results - 1;
  const int rows = result / params.heads, lane = threadIdx.x % params.lanes;
  const Row row{{rows / params.rows, rows % params.rows, result % params.heads}, lane, params.lanes, params.columns};
  const Place& place = row.place;
  const OUT_ELEMENT* dout = place.in<const OUT_ELEMENT>(params.dout, params.dout_strides);
  const int64_t lse_at = (int64_t(place.sequence) * params.heads + place.head) * params.rows + place.row;

  Real sink = -INFINITY;
  if constexpr (SINKS) sink = sink_of(params, place.head);
  Real top = sink;
  for (int n = 0; n < params.count; n++) top = max_of(top, lse_of(params.terms[n].seen, place));
  if (top == -INFINITY) top = Real(0);

  Real total = Real(0), taken = Real(0);
  for (int n = 0; n < params.count; n++) {
    const GradientTerm& term = params.terms[n];
    const Real weight = exp_of(lse_of(term.seen, place) - top), gain = gain_of(row, term.seen, dout);
    total += weight;
    taken = add_weighted(taken, weight, gain);
    if (KEPT && stores && lane == 0) static_cast<LSE_ELEMENT*>(term.dlse)[lse_at] = LSE_ELEMENT(gain);
  }
  if constexpr (SINKS) total += exp_of(sink - top);
  if (total == Real(0)) total = Real(1);
  taken /= total;
  if (params.dlse != nullptr) taken -= Real(*place.in<const MergedLse>(params.dlse, params.dlse_strides));

  for (int n = 0; n < params.count; n++) {
    const GradientTerm& term = params.terms[n];
    const Real share = exp_of(lse_of(term.seen, place) - top) / total;
    Real gain = Real(0);
    if constexpr (!KEPT) gain = gain_of(row, term.seen, dout);
    if (!stores) continue;
    ELEMENT* to = static_cast<ELEMENT*>(term.dout) + int64_t(result) * params.columns;
    for (int first = lane * VECTOR; first < params.columns; first += params.lanes * VECTOR) {
      Real values[VECTOR];
      load_columns(values, dout + first, row.group(first));
#pragma unroll
      for (int i = 0; i < VECTOR; i++) values[i] = share == Real(0) ? Real(0) : share * values[i];
      store_columns(to + first, values, row.group(first));
    }
    if (lane == 0) {
      LSE_ELEMENT* into_lse = static_cast<LSE_ELEMENT*>(term.dlse) + lse_at;
      if constexpr (KEPT) gain = Real(*into_lse);
      *into_lse = LSE_ELEMENT(share == Real(0) ? Real(0) : share * (gain - taken));
    }
  }
  if constexpr (SINKS) {
    const Real share = exp_of(sink - top) / total;
    const int64_t part = int64_t(place.head) * (params.results / params.heads) + rows;
    if (stores && lane == 0) static_cast<Real*>(params.sink_parts)[part] = share == Real(0) ? Real(0) : -share * taken;
  }
}
