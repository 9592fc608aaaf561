// The end of a row whose sums are Reals: what decode_simple and its merge share.
#pragma once

#include "decode/output.cuh"

template <class Real>
DEVICE Real* partial_out(const DecodeParams& params) {
  return reinterpret_cast<Real*>(params.partial_out);
}
// Of a row, its largest score and the sum of e^(score - largest).
template <class Real>
struct PartialSum {
  Real m, l;
};
template <class Real>
DEVICE PartialSum<Real>* partial_sums(const DecodeParams& params) {
  return reinterpret_cast<PartialSum<Real>*>(params.partial_sums);
}

// What a row's sum of weighted values is multiplied and divided by.
template <class Real>
struct Finished {
  Real factor, l, lse;

  __device__ __forceinline__ Real of(Real sum) const { return l == 0 ? Real(0) : sum * factor / l; }
};

// The results of a sum l of weights relative to exp(m). The learned sink, a key without a value, is included.
template <class Real>
DEVICE Finished<Real> finish_row(const DecodeParams& params, int head, Real m, Real l) {
  Real factor = 1;
  if constexpr (SINKS) {
    const Real sink = sink_logit(params.attention, head), top = max_of(m, sink);
    if (top != -INFINITY) {
      factor = exp_of(m - top);
      l = l * factor + exp_of(sink - top);
      m = top;
    }
  }
  return {factor, l, l == 0 ? Real(-INFINITY) : m + log_of(l)};
}
