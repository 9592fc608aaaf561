// A bound of dS, and the power of two that dS is multiplied by so that it fits its type.
//
//   |dS| = P |dP - delta| <= |dO| |V| / (1 - dropout) + |delta|       the largest rows of a sequence and KV head
//
// fp16 ends at 65,504, which dO of a few thousand reach, and its smallest numbers are near 2^-24. dS times the power of two
// is below 2^(DS_BITS + 1); dK and dQ, which are linear in it, are divided by the same power. A score modification's derivative
// multiplies dS and is in no bound, so that DS_BITS leaves room for it.
#pragma once

#include "backward/params.cuh"

enum Bound { LARGEST_DOUT, LARGEST_VALUE, LARGEST_DELTA, BOUNDS };  // of rows: norms, and the magnitude of delta

DEVICE int32_t* ds_bounds_of(const BackwardParams& params, int sequence, int kv_head) {
  return params.ds_bounds + (int64_t(sequence) * params.forward.heads_kv + kv_head) * BOUNDS;
}

// Takes a number of 0 or more in. What is not finite makes NaN of dS anyway.
DEVICE void raise_bound(int32_t* bound, float x) {
  if (x - x == 0.0f) atomicMax(bound, int32_t(ptx::as_bits(x)));  // such floats are in the order of their bits
}

DEVICE float power_of_two(int exponent) {
  return ptx::as_float(uint32_t((exponent > 126 ? 126 : exponent < -126 ? -126 : exponent) + 127) << 23);
}

// log2 of the factor of dS. Two kernels need the same one, so no rounding is left to the compiler, and nothing depends on the
// kernel's macros: dropout_scale is 1 without dropout.
DEVICE int ds_exponent(const BackwardParams& params, int sequence, int kv_head) {
  if constexpr (!DS_BITS) return 0;
  const int32_t* const bounds = ds_bounds_of(params, sequence, kv_head);
  const float dout = ptx::as_float(uint32_t(bounds[LARGEST_DOUT])), value = ptx::as_float(uint32_t(bounds[LARGEST_VALUE]));
  const float product = __fmul_rn(__fmul_rn(dout, value), float(params.forward.dropout_scale));
  const float bound = __fadd_rn(product, ptx::as_float(uint32_t(bounds[LARGEST_DELTA])));
  const uint32_t bits = ptx::as_bits(bound);
  if (bound == 0.0f || bits >> 23 == 255) return 0;
  return DS_BITS - (int(bits >> 23) - 127);
}
