// Four floats rounded to nearest even and packed into a word of 8-bit floats (sm_89), the first in the lowest byte:
// operands of the 8-bit products. What is larger than the largest becomes the largest, a NaN the NaN without a sign.
#pragma once

#include "ptx/convert.cuh"

namespace ptx {

#ifdef GPU_ACTORS_TWINS

DEVICE uint32_t float_to_e4m3(float value) {
  if (value != value) return 0x7f;
  const uint32_t sign = as_bits(value) >> 24 & 0x80;
  const float magnitude = fabsf(value);
  if (magnitude >= 448.0f) return sign | 0x7e;
  if (magnitude < 0x1p-6f) return sign | uint32_t(nearbyintf(magnitude * 0x1p9f));
  const uint32_t bits = as_bits(magnitude) - (120u << 23);
  return sign | (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
}

DEVICE uint32_t pack_e4m3(float a, float b, float c, float d) {
  return float_to_e4m3(a) | float_to_e4m3(b) << 8 | float_to_e4m3(c) << 16 | float_to_e4m3(d) << 24;
}

#else

DEVICE uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t word;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

#endif

}  // namespace ptx
