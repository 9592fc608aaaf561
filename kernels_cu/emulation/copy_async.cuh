// cp.async. The destination is poisoned at once; the data lands when the thread waits for it
// (late), at once (eager), or either way (random).
#pragma once

#include "emulation/mbarrier.cuh"

namespace emulation {

inline void land(Fiber& fiber, CopyAsync& copy) {
  if (copy.landed) return;
  char data[16] = {};
  memcpy(data, copy.source, copy.source_bytes);
  generic_store(copy.destination, data, copy.bytes, "cp.async", fiber.linear, Stores::landing);
  copy.landed = true;
}

inline void land_up_to(Fiber& fiber, uint64_t count) {
  CopyAsyncState& state = fiber.copies;
  uint32_t n = static_cast<uint32_t>(count > state.finished ? count - state.finished : 0);
  for (uint32_t i = 0; i < n; i++) land(fiber, state.pending[i]);
  state.pending.erase(0, n);
  state.finished += n;
}

inline void issue_copy(uint32_t destination, const void* source, int bytes, int valid) {
  Fiber& fiber = self();
  Block& block = *fiber.block;
  if (valid < 0 || valid > bytes) fail(kind::argument, "cp.async: %d of %d bytes", valid, bytes);
  shared_pointer(destination, bytes, "cp.async", bytes);
  if (reinterpret_cast<uintptr_t>(source) % bytes) fail_at(kind::misaligned, source, "cp.async", bytes);
  if (valid) check_global(source, valid, "cp.async", bytes);
  char poison[16];
  memset(poison, POISON, sizeof poison);
  generic_store(destination, poison, bytes, "cp.async", fiber.linear);
  CopyAsync& copy = fiber.copies.pending.push({destination, static_cast<const char*>(source),
                                               static_cast<uint32_t>(bytes), static_cast<uint32_t>(valid), false,
                                               fiber.statement});
  fiber.copies.issued++;
  Delivery delivery = block.request->delivery;
  if (delivery == Delivery::eager || (delivery == Delivery::random && block.random.one_in(2))) land(fiber, copy);
}

inline void commit_copies() {
  CopyAsyncState& state = self().copies;
  state.groups.push(state.issued);
}

inline void wait_for_copies(uint32_t pending_groups) {
  Fiber& fiber = self();
  CopyAsyncState& state = fiber.copies;
  while (state.groups.size > pending_groups) {
    land_up_to(fiber, state.groups[0]);
    state.groups.erase(0);
  }
}

inline void wait_for_all_copies() {
  Fiber& fiber = self();
  land_up_to(fiber, fiber.copies.issued);
  fiber.copies.groups.clear();
}

// The delivery of a cp.async.mbarrier.arrive.
inline void land_and_arrive(const InFlight& arrival) {
  land_up_to(*arrival.fiber, arrival.copies);
  release_lane(*arrival.fiber->block, arrival.fiber->linear);
  update_mbarrier(find_mbarrier(arrival.mbarrier, "cp.async.mbarrier.arrive"), 1, 0, "cp.async.mbarrier.arrive");
}

inline void issue_copy_arrival(uint32_t barrier, bool increment) {
  Fiber& fiber = self();
  Block& block = *fiber.block;
  MBarrier& m = find_mbarrier(barrier, "cp.async.mbarrier.arrive");
  if (increment) m.pending++;
  InFlight arrival{};
  arrival.kind = InFlight::copy_arrival;
  arrival.mbarrier = barrier;
  arrival.fiber = &fiber;
  arrival.copies = fiber.copies.issued;
  arrival.issued = fiber.statement;
  if (block.request->delivery == Delivery::eager) land_and_arrive(arrival);
  else block.in_flight.push(arrival);
}

}  // namespace emulation
