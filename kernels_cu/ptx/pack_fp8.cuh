// Four floats rounded to nearest even and packed into a word of 8-bit floats (sm_89), the first in the lowest byte:
// operands of the 8-bit products. Too large numbers become the largest, and NaN the NaN without a sign.
#pragma once

#include "ptx/convert.cuh"

namespace ptx {

WRAPPER uint32_t pack_e4m3(float a, float b, float c, float d) {
  uint32_t word;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(word)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return word;
}

}  // namespace ptx
