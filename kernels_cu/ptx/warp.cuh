// Warps: electing a lane, and telling the compiler what is uniform. Shuffles and votes are CUDA's own functions.
#pragma once

#include "ptx/types.cuh"

namespace ptx {

// True in one lane of a fully active warp. sm_90.
WRAPPER bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected)::"memory");
  return elected != 0;
}

// Lane 0's value, which the compiler then knows to be the same in the whole warp: branches on it cost no divergence
// code.
WRAPPER int warp_uniform(int value) { return __shfl_sync(~0u, value, 0); }

}  // namespace ptx
