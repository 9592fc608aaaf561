// Host twins of ptx/fence.cuh.
#pragma once

#include "emulation/collective.cuh"

namespace ptx {

DEVICE void fence_proxy_async() {
  emulation::Fiber& fiber = emulation::self();
  fiber.block->mbarrier_init_unfenced = false;
  emulation::publish_writes(fiber);
}
DEVICE void fence_proxy_async_global() {}  // global memory has one view here
DEVICE void fence_mbarrier_init() { emulation::self().block->mbarrier_init_unfenced = false; }

}  // namespace ptx
