// Shared memory of the running block. Dynamic bytes end at an inaccessible page and are surrounded by canaries; static
// __shared__ variables are thread-local, so each worker has its own. There are two views of the dynamic bytes, the
// threads' (generic proxy) and the one that TMA and wgmma see (async proxy); fence.proxy.async carries writes across.
#pragma once

#include "emulation/order.cuh"

namespace emulation {

constexpr uint32_t CANARY_BEFORE = 1024;

inline uint32_t canary_after(const Block& block) { return (1024 - block.shared_bytes % 1024) % 1024; }

inline void start_shared(Block& block) {
  const Arena& arena = *block.worker->arena;
  block.shared_bytes = block.request->shared_bytes;
  block.shared = arena.shared_end - (block.shared_bytes + canary_after(block));
  block.async_view = arena.async_view;
  block.touched = arena.touched;
  start_orders(block);
  memset(block.shared - CANARY_BEFORE, CANARY, CANARY_BEFORE);
  memset(block.shared, POISON, block.shared_bytes);
  memset(block.shared + block.shared_bytes, CANARY, canary_after(block));
  memset(block.async_view, POISON, block.shared_bytes);
  memset(block.writer, 0xFF, (block.shared_bytes / 16 + 1) * sizeof(int16_t));
  Worker& worker = *block.worker;
  memset(worker.static_begin, POISON, worker.static_end - worker.static_begin);
}

inline const char* broken_canary(const Block& block) {
  for (uint32_t i = 1; i <= CANARY_BEFORE; i++)
    if (static_cast<uint8_t>(block.shared[-static_cast<int>(i)]) != CANARY) return "before the first byte";
  for (uint32_t i = 0; i < canary_after(block); i++)
    if (static_cast<uint8_t>(block.shared[block.shared_bytes + i]) != CANARY) return "past the last byte";
  return nullptr;
}

inline bool is_static_shared(uint32_t address, uint32_t bytes) {
  Worker& worker = *self().block->worker;
  return address >= STATIC_SHARED_BASE &&
         uint64_t(address) + bytes <= STATIC_SHARED_BASE + uint64_t(worker.static_end - worker.static_begin);
}

// Host address of `bytes` bytes at a 32-bit shared address.
inline char* shared_pointer(uint32_t address, uint32_t bytes, const char* what, uint32_t alignment = 1) {
  Block& block = *self().block;
  if (address % alignment)
    fail(kind::misaligned, "%s: shared address 0x%x is not %u-byte aligned", what, address, alignment);
  if (is_static_shared(address, bytes)) return block.worker->static_begin + (address - STATIC_SHARED_BASE);
  if (address < SHARED_BASE || uint64_t(address) + bytes > SHARED_BASE + uint64_t(block.shared_bytes))
    fail(kind::out_of_bounds,
         "%s: %u bytes at shared address 0x%x, but dynamic shared memory is 0x%x to 0x%x (%u bytes)", what, bytes,
         address, SHARED_BASE, SHARED_BASE + block.shared_bytes, block.shared_bytes);
  return block.shared + (address - SHARED_BASE);
}

inline bool is_shared(const void* pointer) {
  const Block& block = *self().block;
  const char* p = static_cast<const char*>(pointer);
  return (p >= block.shared && p <= block.shared + block.shared_bytes) ||
         (p >= block.worker->static_begin && p < block.worker->static_end);
}

// The 32-bit address of a pointer into shared memory (cvta.to.shared).
inline uint32_t shared_address_of(const void* pointer) {
  Block& block = *self().block;
  const char* p = static_cast<const char*>(pointer);
  if (p >= block.shared && p <= block.shared + block.shared_bytes) return SHARED_BASE + uint32_t(p - block.shared);
  if (p >= block.worker->static_begin && p < block.worker->static_end)
    return STATIC_SHARED_BASE + uint32_t(p - block.worker->static_begin);
  fail(kind::argument, "shared_address: the pointer is not into shared memory");
}

// The async proxy's view. Static shared variables have one view only, because TMA and wgmma should not use them.
inline char* async_pointer(uint32_t address, uint32_t bytes, const char* what) {
  char* generic = shared_pointer(address, bytes, what);
  if (address >= STATIC_SHARED_BASE) return generic;
  return self().block->async_view + (address - SHARED_BASE);
}

// Reads through the async proxy; generic writes that no fence has carried across are an error.
inline void async_read(uint32_t address, void* out, uint32_t bytes, const char* what) {
  const char* async = async_pointer(address, bytes, what);
  if (memcmp(async, shared_pointer(address, bytes, what), bytes))
    fail(kind::unfenced, "%s reads shared address 0x%x, which the threads wrote without fence.proxy.async", what,
         address);
  memcpy(out, async, bytes);
}

// Bytes that the async proxy is about to overwrite must hold no unfenced generic writes.
inline void async_claim(uint32_t address, uint32_t bytes, const char* what) {
  Block& block = *self().block;
  char* generic = shared_pointer(address, bytes, what);
  char* async = async_pointer(address, bytes, what);
  if (memcmp(async, generic, bytes))
    fail(kind::unfenced, "%s over shared address 0x%x, which the threads wrote without fence.proxy.async", what,
         address);
  if (address < STATIC_SHARED_BASE) {
    for (uint32_t g = (address - SHARED_BASE) / 16; g <= (address - SHARED_BASE + bytes - 1) / 16; g++)
      block.writer[g] = -1;
    claim_order(block, address, bytes, what);
  }
  memset(generic, POISON, bytes);
  memset(async, POISON, bytes);
}

// The async proxy's data lands: both views see it.
inline void async_write(uint32_t address, const void* data, uint32_t bytes, const char* what) {
  memcpy(shared_pointer(address, bytes, what), data, bytes);
  memcpy(async_pointer(address, bytes, what), data, bytes);
}

// A load of at most 16 naturally aligned bytes by the running thread.
inline void generic_load(uint32_t address, void* data, uint32_t bytes, const char* what) {
  const Fiber& fiber = self();
  memcpy(data, shared_pointer(address, bytes, what, bytes), bytes);
  if (address < STATIC_SHARED_BASE) note_read(*fiber.block, fiber.warp, 1u << fiber.lane, address, bytes, what);
}

// A store of at most 16 naturally aligned bytes by a known thread, which alone can publish it with a fence. landing: of
// bytes that it has stored to before.
enum class Stores { lane, collective, landing };
inline void generic_store(uint32_t address, const void* data, uint32_t bytes, const char* what, int thread,
                          Stores stores = Stores::lane) {
  Block& block = *self().block;
  char* p = shared_pointer(address, bytes, what, bytes);
  if (address < STATIC_SHARED_BASE) {
    const bool collective = stores == Stores::collective;
    const uint32_t lanes = collective ? block.warp[thread / 32].lanes : 1u << thread % 32;
    if (stores == Stores::landing) note_landing(block, thread, address, bytes);
    else note_write(block, thread / 32, lanes, collective, address, bytes, data, p, what);
  }
  if (address < STATIC_SHARED_BASE && memcmp(p, data, bytes)) {  // writing the same value again changes nothing
    uint32_t granule = (address - SHARED_BASE) / 16;
    if (block.writer[granule] != thread) block.written[thread].push(granule);
    block.writer[granule] = int16_t(thread);
  }
  memcpy(p, data, bytes);
}

inline void publish(Block& block, uint32_t granule) {
  uint32_t at = granule * 16, bytes = lower(16u, block.shared_bytes - at);
  memcpy(block.async_view + at, block.shared + at, bytes);
  block.writer[granule] = -1;
}

// fence.proxy.async publishes the writes of the thread that executes it: those of the store wrappers by their writer;
// plain C++ stores have no known writer and are published by any fence.
inline void publish_writes(Fiber& fiber) {
  Block& block = *fiber.block;
  List<uint32_t>& mine = block.written[fiber.linear];
  for (uint32_t granule : mine)
    if (block.writer[granule] == fiber.linear) publish(block, granule);
  mine.clear();
  constexpr uint32_t CHUNK = 4096;
  for (uint32_t at = 0; at < block.shared_bytes; at += CHUNK) {
    uint32_t bytes = lower(CHUNK, block.shared_bytes - at);
    if (memcmp(block.async_view + at, block.shared + at, bytes) == 0) continue;
    for (uint32_t granule = at / 16; granule * 16 < at + bytes; granule++)
      if (block.writer[granule] < 0) publish(block, granule);
  }
}

// Where the 16 bytes at `address` of an unswizzled tile lie. swizzle: 1 for 128, 2 for 64, 3 for 32 bytes, 0 for none.
inline uint32_t swizzle_lines(int swizzle) { return swizzle == 1 ? 7 : swizzle == 2 ? 3 : swizzle == 3 ? 1 : 0; }
inline uint32_t swizzled(uint32_t address, int swizzle) {
  return address ^ (address >> 7 & swizzle_lines(swizzle)) << 4;
}

// Global memory that a wrapper touches must lie inside one buffer of the launch, whose number this is.
inline uint32_t check_global(const void* pointer, size_t bytes, const char* what, size_t alignment) {
  const Request& request = *self().block->request;
  uint64_t at = reinterpret_cast<uintptr_t>(pointer);
  if (at % alignment) fail_at(kind::misaligned, pointer, what, bytes);
  for (uint32_t i = 0; i < request.buffer_count; i++)
    if (at >= request.buffers[i].begin && at + bytes <= request.buffers[i].end) return i;
  fail_at(kind::out_of_bounds, pointer, what, bytes);
}

// ---- global memory has one view. What the block's threads have stored must be fenced before the async proxy accesses
// it: by the writer, or by a thread that has waited for the writer.
inline void note_global_store(const void* pointer, uint32_t bytes, uint32_t buffer) {
  const Fiber& fiber = self();
  Block& block = *fiber.block;
  List<UnfencedStore>& stores = block.unfenced[buffer];
  if (stores.size == MAX_UNFENCED) return;
  stores.push({static_cast<const char*>(pointer), bytes, block.order[fiber.warp].time, fiber.linear});
  block.stores_unfenced = true;
}
inline void publish_global_stores(const Fiber& fiber) {
  Block& block = *fiber.block;
  block.stores_unfenced = false;
  for (uint32_t i = 0; i < block.request->buffer_count; i++) {
    List<UnfencedStore>& stores = block.unfenced[i];
    uint32_t left = 0;
    for (const UnfencedStore& store : stores)
      if (!knows(block, fiber, store.thread, store.time)) stores[left++] = store;
    stores.size = left;
    block.stores_unfenced |= left > 0;
  }
}
inline void check_global_view(const char* at, uint32_t bytes, uint32_t buffer, const char* what) {
  const Block& block = *self().block;
  if (!block.stores_unfenced) return;
  for (const UnfencedStore& store : block.unfenced[buffer])
    if (at < store.at + store.bytes && store.at < at + bytes) {
      char text[96];
      snprintf(text, sizeof text, "%s of what thread %d stored without fence.proxy.async", what, store.thread);
      fail_at(kind::unfenced, store.at, text, store.bytes);
    }
}

}  // namespace emulation
