// cp.async (sm_80): copies of 4, 8 or 16 bytes from global to shared memory that a thread waits for by groups.
// They write through the generic proxy: before wgmma or TMA reads the data, fence_proxy_async().
#pragma once

#include "ptx/types.cuh"

namespace ptx {

// Copies the first `valid` of BYTES bytes and writes zeros for the rest; with valid 0 the source is not read. Both
// addresses are multiples of BYTES. 16-byte copies bypass L1.
template <int BYTES>
WRAPPER void cp_async(uint32_t destination, const void* source, int valid = BYTES) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(valid)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(destination), "l"(source), "n"(BYTES), "r"(valid)
                 : "memory");
}

// The thread's copies since the last commit become a group (possibly an empty one).
WRAPPER void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's latest groups are on their way. Other threads see the data after a
// barrier.
template <int PENDING>
WRAPPER void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Waits for all copies of this thread, committed or not.
WRAPPER void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// When all of this thread's earlier copies have landed, one arrival happens at the mbarrier. It is one of the arrivals
// that the mbarrier was initialised for.
WRAPPER void cp_async_arrive_noinc(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// The same, but the phase is made to expect one arrival more at once: it cannot end before these copies have landed,
// and the thread still owes its own arrival.
WRAPPER void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace ptx
