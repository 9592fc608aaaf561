// Conversions between float and its bits, and between float and half precision. fp8 is decoded by way of the latter,
// which every architecture converts: the fp8 instructions exist from sm_89 on only.
#pragma once

#include "ptx/types.cuh"

namespace ptx {

WRAPPER float as_float(uint32_t bits) { return __uint_as_float(bits); }
WRAPPER uint32_t as_bits(float value) { return __float_as_uint(value); }

WRAPPER float half_to_float(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

WRAPPER uint16_t float_to_half(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

}  // namespace ptx
