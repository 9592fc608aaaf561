// Bulk copies and reductions (sm_90): one thread moves consecutive bytes between global and shared memory through the
// async proxy. Addresses and sizes are multiples of 16. Loads complete on an mbarrier; stores and reductions by groups
// of the issuing thread, which tensor stores (ptx/tma.cuh) share.
#pragma once

#include "ptx/types.cuh"

namespace ptx {

// What L2 does with the lines, as createpolicy.fractional with fraction 1 encodes it.
enum class CachePolicy : uint64_t {
  evict_normal = 0x1000000000000000ull,
  evict_first = 0x12F0000000000000ull,
  evict_last = 0x14F0000000000000ull,
};

// Global to shared memory; `bytes` are counted off the mbarrier's announced bytes as they land.
WRAPPER void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier,
                      CachePolicy policy = CachePolicy::evict_normal) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(destination),
      "l"(source), "r"(bytes), "r"(barrier), "l"(static_cast<uint64_t>(policy))
      : "memory");
}

WRAPPER void bulk_store(void* destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes)
               : "memory");
}

// destination[i] += source[i], each addition atomic.
WRAPPER void bulk_reduce_add_f32(float* destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
}
WRAPPER void bulk_reduce_add_f16(void* destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16 [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
}
WRAPPER void bulk_reduce_add_bf16(void* destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%0], [%1], %2;" ::"l"(destination),
               "r"(source), "r"(bytes)
               : "memory");
}

// This thread's stores and reductions since the last commit become a group.
WRAPPER void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but the latest PENDING groups have read their shared memory, which may then be written again.
template <int PENDING>
WRAPPER void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// Waits until all but the latest PENDING groups are done: their writes are visible to this thread.
template <int PENDING>
WRAPPER void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}

}  // namespace ptx
