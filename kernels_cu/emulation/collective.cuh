// Warp collectives (the last lane to arrive computes for all) and the block's sixteen barriers.
#pragma once

#include "emulation/shared_memory.cuh"

namespace emulation {

inline Rendezvous& find_rendezvous(Warp& warp, uint32_t mask, const char* operation) {
  for (Rendezvous& r : warp.rendezvous)
    if (r.arrived && r.mask == mask) return r;
  for (Rendezvous& r : warp.rendezvous)
    if (!r.arrived) return r;
  fail(kind::divergence, "%s: more than %d different masks are waiting in this warp", operation, RENDEZVOUS);
}

Rendezvous* join(const char* operation, uint32_t mask, void* argument) {
  Fiber& fiber = self();
  Warp& warp = fiber.block->warp[fiber.warp];
  uint32_t bit = 1u << fiber.lane;
  if (!(mask & bit)) fail(kind::divergence, "%s: this lane is not in its own mask 0x%x", operation, mask);
  Rendezvous& r = find_rendezvous(warp, mask, operation);
  if (!r.arrived) {
    r.operation = operation;
    r.mask = mask;
  } else if (r.operation != operation && strcmp(r.operation, operation)) {
    fail(kind::divergence, "the warp diverged: this lane is at %s while other lanes of mask 0x%x wait at %s", operation,
         mask, r.operation);
  }
  r.argument[fiber.lane] = argument;
  r.arrived |= bit;
  if (r.arrived == (mask & warp.lanes)) return &r;
  wait_for(fiber, &r.generation, r.generation, operation);
  return nullptr;
}

void leave(Rendezvous& rendezvous) {
  rendezvous.arrived = 0;
  rendezvous.generation++;
}

void sync_warp(uint32_t mask) {
  int nothing = 0;
  collective("__syncwarp", mask, nothing, [mask](int**) {
    const Fiber& fiber = self();
    bring_together(fiber.block->warp[fiber.warp], fiber.block->order[fiber.warp], mask);
  });
}

// A collective that only brings the whole warp together (".sync.aligned").
inline void gather_warp(const char* operation) {
  int nothing = 0;
  collective(operation, ~0u, nothing, [](int**) {});
}

// A collective whose last lane acts once for the warp.
template <class Act>
inline void once_a_warp(const char* operation, Act&& act) {
  int nothing = 0;
  collective(operation, ~0u, nothing, [&](int**) { act(); });
}

inline void release_if_complete(Block& block, int number) {
  NamedBarrier& b = block.barrier[number];
  int expected = b.expected < 0 ? block.live : b.expected;
  if (b.arrived > expected)
    fail(kind::barrier, "barrier %d: %d threads arrived, %d are expected", number, b.arrived, expected);
  if (b.arrived != expected) return;
  b.arrived = 0;
  b.generation++;
  for (int i = 0; b.expected < 0 && i < block.warp_count; i++) {
    release_warp(block.order[i]);
    bring_together(block.order[i]);
  }
}

void arrive_at_barrier(int number, int threads, bool wait) {
  Fiber& fiber = self();
  Block& block = *fiber.block;
  if (number < 0 || number > 15) fail(kind::barrier, "barrier %d: a block has barriers 0 to 15", number);
  if (threads >= 0 && (threads == 0 || threads % 32))
    fail(kind::barrier, "barrier %d: %d threads is no multiple of 32", number, threads);
  NamedBarrier& b = block.barrier[number];
  if (b.arrived && b.expected != threads)
    fail(kind::barrier, "barrier %d: this thread expects %d threads, earlier arrivals expected %d", number, threads,
         b.expected);
  b.expected = threads;
  b.arrived++;
  uint64_t generation = b.generation;
  release_if_complete(block, number);
  if (wait && b.generation == generation) wait_for(fiber, &b.generation, generation, "barrier", number);
}

int count_votes(bool vote) {
  Block& block = *self().block;
  arrive_at_barrier(0, -1, true);
  block.votes += vote;
  arrive_at_barrier(0, -1, true);
  int votes = block.votes;
  arrive_at_barrier(0, -1, true);
  block.votes = 0;
  return votes;
}

// 2 GHz. A loop over it lets other threads run, because on a GPU all threads of a block wait at once.
long long read_clock() {
  timespec t{0, 20000};
  if (self().linear == 0) nanosleep(&t, nullptr);
  poll();
  clock_gettime(CLOCK_MONOTONIC, &t);
  return 2 * (t.tv_sec * 1000000000ll + t.tv_nsec);
}

}  // namespace emulation
