// The block's named barriers. Barrier 0 is __syncthreads(); kernels use 1 to 15, with constant numbers where they can.
#pragma once

#include "ptx/types.cuh"

namespace ptx {

// Waits until `threads` threads (a multiple of 32) have arrived at barrier `id`, this one included.
WRAPPER void barrier_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Counts this thread as arrived and goes on.
WRAPPER void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace ptx
