// Two floats rounded to nearest even and packed into a word (sm_80), the first in the low half: operands of the 16-bit
// mma.
#pragma once

#include "ptx/convert.cuh"

namespace ptx {

WRAPPER uint32_t pack_half(float low, float high) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

WRAPPER uint32_t pack_bfloat16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

}  // namespace ptx
