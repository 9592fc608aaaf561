// Conversions between float and its bits, and between float and half precision. fp8 is decoded by way of the latter,
// which every architecture converts: the fp8 instructions exist from sm_89 on only.
#pragma once

#include "ptx/types.cuh"

namespace ptx {

DEVICE float as_float(uint32_t bits) { return __uint_as_float(bits); }
DEVICE uint32_t as_bits(float value) { return __float_as_uint(value); }

#ifdef GPU_ACTORS_TWINS

DEVICE float half_to_float(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) return as_float(sign | 0x7f800000u | fraction << 13);
  if (exponent != 0) return as_float(sign | (exponent + 112) << 23 | fraction << 13);
  return as_float(sign | as_bits(float(fraction) * 0x1p-24f));
}

DEVICE uint16_t float_to_half(float value) {
  if (value != value) return 0x7fff;
  const uint16_t sign = as_bits(value) >> 16 & 0x8000;
  const float magnitude = fabsf(value);
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  if (magnitude < 0x1p-14f) return sign | uint16_t(nearbyintf(magnitude * 0x1p24f));
  const uint32_t bits = as_bits(magnitude) - (112u << 23);
  return sign | uint16_t((bits + 0xfff + (bits >> 13 & 1)) >> 13);
}

#else

DEVICE float half_to_float(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

DEVICE uint16_t float_to_half(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

#endif

}  // namespace ptx
