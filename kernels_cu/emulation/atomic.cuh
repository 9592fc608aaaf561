// Host twins of ptx/atomic.cuh: blocks run on several processors, so these are real atomics.
#pragma once

#include "emulation/collective.cuh"

namespace ptx {

DEVICE int load_acquire(const int* pointer) {
  emulation::check_global(pointer, 4, "ld.acquire", 4);
  emulation::poll();  // the thread that writes it gets a turn
  return __atomic_load_n(pointer, __ATOMIC_SEQ_CST);
}
DEVICE void store_release(int* pointer, int v) {
  emulation::check_global(pointer, 4, "st.release", 4);
  __atomic_store_n(pointer, v, __ATOMIC_SEQ_CST);
}
DEVICE int atomic_add_acq_rel(int* pointer, int v) {
  emulation::check_global(pointer, 4, "atom.add", 4);
  return __atomic_fetch_add(pointer, v, __ATOMIC_SEQ_CST);
}
DEVICE void reduce_add_release(int* pointer, int v) {
  emulation::check_global(pointer, 4, "red.add", 4);
  __atomic_fetch_add(pointer, v, __ATOMIC_SEQ_CST);
}
DEVICE void reduce_add(float* pointer, float v) {
  emulation::check_global(pointer, 4, "red.add.f32", 4);
  atomicAdd(pointer, v);
}
DEVICE void reduce_add_v4(float* pointer, const float (&v)[4]) {
  emulation::check_global(pointer, 16, "red.add.v4.f32", 16);
  for (int i = 0; i < 4; i++) atomicAdd(pointer + i, v[i]);
}

}  // namespace ptx
