// Memory operations with an order between blocks (device scope), and reductions that return nothing. Relaxed atomics
// that return the old value are CUDA's own atomicAdd, atomicCAS, atomicExch, atomicMax ...
#pragma once

#include "ptx/types.cuh"

namespace ptx {

// What other blocks wrote before their release is visible after this. Loops that poll use it.
WRAPPER int load_acquire(const int* pointer) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(pointer) : "memory");
  return v;
}
// What this thread wrote, or saw through a barrier, is visible to the thread that acquires the value.
WRAPPER void store_release(int* pointer, int v) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(pointer), "r"(v) : "memory");
}
// Adds and returns the old value, with both orders: the last of n arrivals sees what the others wrote.
WRAPPER int atomic_add_acq_rel(int* pointer, int v) {
  int old;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(old) : "l"(pointer), "r"(v) : "memory");
  return old;
}
WRAPPER void reduce_add_release(int* pointer, int v) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(pointer), "r"(v) : "memory");
}

WRAPPER void reduce_add(float* pointer, float v) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(pointer), "f"(v) : "memory");
}
// Four consecutive floats at a multiple of 16 bytes; each is added on its own. sm_90.
WRAPPER void reduce_add_v4(float* pointer, const float (&v)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "f"(v[0]), "f"(v[1]),
               "f"(v[2]), "f"(v[3])
               : "memory");
}

}  // namespace ptx
