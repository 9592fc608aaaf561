// Pins values to a place in the code that compilers would otherwise move, or compute again.
#pragma once

#include "ptx/types.cuh"

namespace ptx {

// The compiler moves no read of these registers above this place and no write below it.
template <int N>
WRAPPER void pin_registers(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(r[i])::"memory");
}
template <int N>
WRAPPER void pin_registers(uint32_t (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(r[i])::"memory");
}
template <int M, int N>
WRAPPER void pin_registers(uint32_t (&r)[M][N]) {
#pragma unroll
  for (int i = 0; i < M; i++) pin_registers(r[i]);
}

}  // namespace ptx
