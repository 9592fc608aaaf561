// How Hopper's tensor cores sum products of 8-bit elements: a model of what others have measured, for NVIDIA
// publishes nothing of it.
//
// - DeepSeek-V3 (arXiv 2412.19437, sections 3.3.2 and 3.5.2), on Hopper: the 32 products of an instruction are shifted
//   right to the largest exponent, and about 14 bits of each are summed; what lies below is cut off. The registers that
//   take the sum are no more precise.
// - SageAttention2 (arXiv 2411.10958), on Ada and Hopper: an accumulator has a sign, 8 exponent bits and 13 fraction
//   bits, and what a float has below them is cut off.
//
// The model: the addends of an element of d are its products and, where it accumulates, its old value. The largest of
// their exponents gives a unit, 2^-13 of that power of two. Each addend is cut off toward zero to whole units, these are
// added exactly, and the sum is cut off to 13 fraction bits. It is a model: of the order in which hardware adds, and of
// bits that it may keep in between, too little is known.
//
// For wgmma alone. mma.sync of 8-bit elements becomes products of f16 on sm_90, and no kernel here uses it on sm_89.
#pragma once

#include "emulation/formats.cuh"

namespace emulation {

constexpr int KEPT_FRACTION_BITS = 13;

// COLUMNS elements of a row of d: d += a[0 .. k) b[0 .. k)[0 .. COLUMNS), whose rows lie `pitch` apart. A sum with an
// infinity or a NaN is what fp32 makes of it.
template <int COLUMNS>
inline void add_truncated(const float* a, const float* b, int pitch, int k, float* d) {
  constexpr uint32_t MAGNITUDE = 0x7FFFFFFFu, EXPONENT = 0x7F800000u, LEAST = 14u << 23;  // its unit is normal, too
  constexpr uint32_t DROPPED = (1u << (23 - KEPT_FRACTION_BITS)) - 1, FRACTION = uint32_t(KEPT_FRACTION_BITS) << 23;
  float plain[COLUMNS], to_units[COLUMNS], unit[COLUMNS];
  uint32_t top[COLUMNS];  // magnitudes' bits are in the order of magnitudes
  int sum[COLUMNS];
  for (int j = 0; j < COLUMNS; j++) plain[j] = d[j], top[j] = __float_as_uint(d[j]) & MAGNITUDE;
  for (int x = 0; x < k; x++)
    for (int j = 0; j < COLUMNS; j++) {
      const float product = a[x] * b[x * pitch + j];
      const uint32_t magnitude = __float_as_uint(product) & MAGNITUDE;
      plain[j] += product;
      top[j] = magnitude > top[j] ? magnitude : top[j];
    }
  float probe = 0.0f;
  for (int j = 0; j < COLUMNS; j++) probe += plain[j] * 0.0f;
  if (probe != 0.0f) {  // NaN: some sum is not finite
    if constexpr (COLUMNS == 1) d[0] = plain[0];
    else
      for (int j = 0; j < COLUMNS; j++) add_truncated<1>(a, b + j, pitch, k, d + j);
    return;
  }
  for (int j = 0; j < COLUMNS; j++) {
    const uint32_t exponent = (top[j] & EXPONENT) > LEAST ? top[j] & EXPONENT : LEAST;
    unit[j] = float_of(exponent - FRACTION);
    to_units[j] = float_of((254u << 23) + FRACTION - exponent);
    sum[j] = int(d[j] * to_units[j]);
  }
  for (int x = 0; x < k; x++)
    for (int j = 0; j < COLUMNS; j++) sum[j] += int(a[x] * b[x * pitch + j] * to_units[j]);
  for (int j = 0; j < COLUMNS; j++) d[j] = float_of(__float_as_uint(float(sum[j]) * unit[j]) & ~DROPPED);
}

}  // namespace emulation
