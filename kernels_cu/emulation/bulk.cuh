// Bulk copies, and what they have in common with tensor copies.
#pragma once

#include "emulation/approximation.cuh"
#include "emulation/formats.cuh"
#include "emulation/mbarrier.cuh"
#include "ptx/bulk.cuh"

namespace emulation {

// ---- loads
// The destination is poisoned at once; the data lands when nothing else can run (late), at once (eager), or at random.
inline void deliver(const InFlight& load);

inline void send(InFlight& load) {
  Block& block = *self().block;
  load.fiber = &self();
  load.issued = load.fiber->statement;
  if (block.request->delivery == Delivery::eager) deliver(load);
  else block.in_flight.push(load);
}

inline void check_policy(ptx::CachePolicy policy, const char* operation) {
  if (policy != ptx::CachePolicy::evict_normal && policy != ptx::CachePolicy::evict_first &&
      policy != ptx::CachePolicy::evict_last)
    fail(kind::argument, "%s: 0x%llx is no cache policy", operation, static_cast<unsigned long long>(policy));
}

inline void check_load_barrier(uint32_t barrier, const char* operation) {
  find_mbarrier(barrier, operation);
  if (self().block->mbarrier_init_unfenced)
    fail(kind::unfenced, "%s: mbarrier.init is not followed by fence_mbarrier_init or fence_proxy_async", operation);
}

inline void check_bulk(uint32_t shared, const void* global, uint32_t bytes, const char* operation) {
  if (bytes == 0 || bytes % 16) fail(kind::misaligned, "%s: %u bytes is no positive multiple of 16", operation, bytes);
  shared_pointer(shared, bytes, operation, 16);
  check_global_view(static_cast<const char*>(global), bytes, check_global(global, bytes, operation, 16), operation);
}

inline void issue_bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier,
                            ptx::CachePolicy policy) {
  constexpr const char* operation = "bulk load";
  check_policy(policy, operation);
  check_bulk(destination, source, bytes, operation);
  check_load_barrier(barrier, operation);
  async_claim(destination, bytes, operation);
  InFlight load{};
  load.kind = InFlight::bulk;
  load.shared = destination;
  load.source = static_cast<const char*>(source);
  load.bytes = bytes;
  load.mbarrier = barrier;
  send(load);
}

inline void land_bulk(const InFlight& load) { async_write(load.shared, load.source, load.bytes, "bulk load"); }

// ---- stores
// Shared memory is read at issue and must not change until wait_group.read; global memory changes at the wait (late),
// at the commit (eager), or either way.
inline void start_store(BulkStore& store, const char* operation) {
  store.issued = self().statement;
  store.snapshot = static_cast<char*>(malloc(store.bytes));
  for (uint32_t at = 0; at < store.bytes; at += 16)
    async_read(swizzled(store.shared + at, store.map.swizzle), store.snapshot + at, 16, operation);
  self().bulk.stores.push(store);
}

inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

// Additions of floats to global memory flush subnormals on today's GPUs (PTX ISA 9.7.13.5, .6 and 9.7.9.25.5).
inline void add_float(float* to, float summand) {
  if (!like_hardware()) return static_cast<void>(atomicAdd(to, summand));
  update_atomically(to, [summand](float old) { return flushed(flushed(old) + flushed(summand)); });
}

// f16 and bf16 additions round to nearest even, as the hardware's do.
inline void add_number(char* to, const char* from, int number) {
  if (number == 1 || number == 4) {
    uint32_t bits;
    memcpy(&bits, from, 4);
    if (number == 4) atomicAdd(reinterpret_cast<uint32_t*>(to), bits);
    else add_float(reinterpret_cast<float*>(to), __uint_as_float(bits));
    return;
  }
  uint16_t bits;
  memcpy(&bits, from, 2);
  update_atomically(reinterpret_cast<uint16_t*>(to), [&](uint16_t old) {
    return number == 2 ? to_f16(from_f16(old) + from_f16(bits)) : to_bf16(from_bf16(old) + from_bf16(bits));
  });
}

inline void write_global(char* to, const char* from, uint32_t bytes, const BulkStore& store) {
  if (!store.reduce) {
    memcpy(to, from, bytes);
    return;
  }
  uint32_t step = store.map.element_bytes;
  for (uint32_t at = 0; at < bytes; at += step) add_number(to + at, from + at, store.map.number);
}

inline void write_tensor(const BulkStore& store);

inline void finish_write(BulkStore& store) {
  if (store.written) return;
  blame(*self().block, -1, store.issued);
  if (store.map.rank) write_tensor(store);
  else write_global(store.map.base, store.snapshot, store.bytes, store);
  blame_running(*self().block);
  store.written = true;
}

inline void finish_read(BulkStore& store) {
  if (store.read) return;
  blame(*self().block, -1, store.issued);
  for (uint32_t at = 0; at < store.bytes; at += 16) {
    uint32_t address = swizzled(store.shared + at, store.map.swizzle);
    if (memcmp(shared_pointer(address, 16, "bulk store"), store.snapshot + at, 16))
      fail(kind::race,
           "shared address 0x%x changed while a bulk or tensor store was reading it (before wait_group.read)", address);
  }
  blame_running(*self().block);
  store.read = true;
}

inline void commit_stores() {
  BulkStoreState& state = self().bulk;
  Block& block = *self().block;
  for (uint32_t i = state.committed; i < state.stores.size; i++)
    if (block.request->delivery == Delivery::eager ||
        (block.request->delivery == Delivery::random && block.random.one_in(2)))
      finish_write(state.stores[i]);
  state.groups.push(state.stores.size - state.committed);
  state.committed = state.stores.size;
}

inline void wait_for_reads(uint32_t pending_groups) {
  BulkStoreState& state = self().bulk;
  uint32_t first = 0;
  for (uint32_t g = 0; g + pending_groups < state.groups.size; first += state.groups[g++])
    for (uint32_t i = first; i < first + state.groups[g]; i++) finish_read(state.stores[i]);
}

inline void wait_for_stores(uint32_t pending_groups) {
  BulkStoreState& state = self().bulk;
  wait_for_reads(pending_groups);
  while (state.groups.size > pending_groups) {
    uint32_t count = state.groups[0];
    for (uint32_t i = 0; i < count; i++) {
      finish_write(state.stores[i]);
      free(state.stores[i].snapshot);
    }
    state.stores.erase(0, count);
    state.committed -= count;
    state.groups.erase(0);
  }
}

inline void issue_bulk_store(void* destination, uint32_t source, uint32_t bytes, int number, const char* operation) {
  check_bulk(source, destination, bytes, operation);
  BulkStore store{};
  store.map.base = static_cast<char*>(destination);
  store.map.number = static_cast<uint8_t>(number);
  store.map.element_bytes = number == 1 ? 4 : 2;
  store.shared = source;
  store.bytes = bytes;
  store.reduce = number != 0;
  start_store(store, operation);
}

}  // namespace emulation
