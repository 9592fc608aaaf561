// Fences between proxies (sm_90). TMA and wgmma read and write shared memory through the async proxy, threads through
// the generic one: writes of one are visible to the other only across a fence.
#pragma once

#include "ptx/types.cuh"

namespace ptx {

// This thread's writes to shared memory become visible to TMA and wgmma. Every writing thread executes it, then a
// barrier.
WRAPPER void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same for writes to global memory that a bulk or tensor copy will read.
WRAPPER void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// mbarrier.init of this thread becomes visible to the async proxy.
WRAPPER void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

}  // namespace ptx
