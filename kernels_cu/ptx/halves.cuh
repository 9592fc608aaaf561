// Arithmetic on two 16-bit floats at once (sm_80), the first in the low half. Subnormals count, as in mma operands.
#pragma once

#include "ptx/pack.cuh"

namespace ptx {

WRAPPER uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// There is no plain product before sm_90; adding -0 changes nothing, signed zeros included.
WRAPPER uint32_t multiply_bfloat16s(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
  return product;
}

}  // namespace ptx
