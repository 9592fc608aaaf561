// mbarriers: 8-byte objects in dynamic shared memory that count arrivals and, on sm_90, bytes of copies on their way.
//
// A phase ends when no arrival and no byte is pending; then the count starts again. wait(parity) passes if the phase of
// that parity has ended: a fresh mbarrier lets parity 1 pass and holds parity 0. Waiting on a full stage goes 0, 1, 0
// ..., waiting on an empty one 1, 0, 1 ...
#pragma once

#include "ptx/types.cuh"

namespace ptx {

// One thread initialises it for `count` arrivals a phase; then fence_mbarrier_init() and a barrier before others use
// it.
WRAPPER void mbarrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Ends it, so that the memory may be used for something else.
WRAPPER void mbarrier_invalidate(uint32_t barrier) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

WRAPPER void mbarrier_arrive(uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}
// Announces `bytes` more bytes for this phase and arrives. sm_90.
WRAPPER void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Announces bytes without arriving. sm_90.
WRAPPER void mbarrier_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase of this parity has ended; may wait a while before it says no. sm_90.
WRAPPER bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t passed;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(passed)
               : "r"(barrier), "r"(parity)
               : "memory");
  return passed != 0;
}
// Waits until the phase of this parity has ended. sm_90.
WRAPPER void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra WAIT_%=;\n}" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}

}  // namespace ptx
