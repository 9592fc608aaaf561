// Two floats rounded to nearest even and packed into a word (sm_80), the first in the low half: operands of the 16-bit
// mma.
#pragma once

#include "ptx/convert.cuh"

namespace ptx {

#ifdef GPU_ACTORS_TWINS

DEVICE uint32_t pack_half(float low, float high) { return uint32_t(float_to_half(high)) << 16 | float_to_half(low); }

DEVICE uint32_t pack_bfloat16(float low, float high) {
  const float values[2] = {low, high};
  uint32_t halves[2];
  for (int i = 0; i < 2; i++) {
    const uint32_t bits = as_bits(values[i]);
    halves[i] = values[i] != values[i] ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  return halves[1] << 16 | halves[0];
}

#else

DEVICE uint32_t pack_half(float low, float high) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

DEVICE uint32_t pack_bfloat16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

#endif

}  // namespace ptx
