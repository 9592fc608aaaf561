// A bound of dS, and the power of two that dS is multiplied by so that it fits its type.
//
//   |dS| = P |dP - delta| <= |dO| |V| / (1 - dropout) + |delta|       the largest rows of a sequence and KV head
//
// fp16 ends at 65,504, which dS reaches with dO of a few thousand, and its smallest numbers are near 2^-24. dS times
// the power of two is below 2^(DS_BITS + 1); dK and dQ, which are linear in it, are divided by the same power. The
// bound does not have a score modification's derivative, which multiplies dS, so DS_BITS leaves room for it.
//
// The first kernel raises the bounds, block by block. Its last block of a KV head computes the exponent from them and
// sets them to 0 for the next launch.
#pragma once

#include "backward/params.cuh"
#include "ptx/atomic.cuh"

// The largest norms of rows, and the largest |delta|. ARRIVED: blocks that have raised the bounds.
enum Bound { LARGEST_DOUT, LARGEST_VALUE, LARGEST_DELTA, ARRIVED, BOUNDS };

DEVICE int32_t* ds_bounds_of(const BackwardParams& params, int sequence, int kv_head) {
  return params.ds_bounds + (int64_t(sequence) * params.forward.heads_kv + kv_head) * BOUNDS;
}

// x: 0 or more. Nonfinite values are left out, because they make dS NaN anyway.
DEVICE void raise_bound(int32_t* bound, float x) {
  if (x - x == 0.0f) atomicMax(bound, int32_t(ptx::as_bits(x)));  // floats of 0 or more are ordered like their bits
}

DEVICE float power_of_two(int exponent) {
  return ptx::as_float(uint32_t((exponent > 126 ? 126 : exponent < -126 ? -126 : exponent) + 127) << 23);
}

// Returns a bound and sets it to 0.
DEVICE float take_bound(int32_t* bound) { return ptx::as_float(uint32_t(atomicExch(bound, 0))); }

// Called by each whole block that has raised its bounds. The last of the KV head's `blocks` computes the exponent.
DEVICE void settle_bounds(const BackwardParams& params, int sequence, int kv_head, int blocks) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  int32_t* const bounds = ds_bounds_of(params, sequence, kv_head);
  if (ptx::atomic_add_acq_rel(bounds + ARRIVED, 1) != blocks - 1) return;
  const float product = take_bound(bounds + LARGEST_DOUT) * take_bound(bounds + LARGEST_VALUE);
  const float bound = product * float(params.forward.dropout_scale) + take_bound(bounds + LARGEST_DELTA);
  bounds[ARRIVED] = 0;
  const int exponent = int(ptx::as_bits(bound) >> 23);
  const bool usable = bound != 0.0f && exponent != 255;
  params.ds_exponents[int64_t(sequence) * params.forward.heads_kv + kv_head] = usable ? DS_BITS - (exponent - 127) : 0;
}

// log2 of the factor of dS.
DEVICE int ds_exponent(const BackwardParams& params, int sequence, int kv_head) {
  if constexpr (!DS_BITS) return 0;
  return params.ds_exponents[int64_t(sequence) * params.forward.heads_kv + kv_head];
}
