// Which thread runs next, and what happens when none can.
#pragma once

#include "emulation/fiber.cuh"

namespace emulation {

bool deliver_one(Block& block);  // delivery.cuh: one load in flight lands; false if there is none

// Checks the time limit of the launch. A signal ends loops that do not come here.
inline void check_time(Block& block) {
  if (__builtin_expect(block.worker->expired, 0))
    fail(kind::time_limit, "the launch ran longer than its %g s (this thread was %s)", block.request->limit_seconds,
         self().waits_for ? self().waits_for : "running");
}

inline Turn& turn_of(Fiber& fiber) { return fiber.block->turn[fiber.linear]; }

inline void resume(Fiber& next) {
  Block& block = *next.block;
  Fiber* previous = block.current;
  block.current = &next;
  block.worker->switches++;
  switch_context(previous ? &previous->stack_pointer : &block.worker->stack_pointer, next.stack_pointer);
}

// Every thread in turn.
inline Fiber* pick_round_robin(Block& block) {
  for (int i = 0; i < block.threads; i++) {
    if (++block.position >= block.threads) block.position = 0;
    const int thread = block.thread_order[block.position];
    if (block.turn[thread].runnable()) return block.fiber[thread];
  }
  return nullptr;
}

inline Fiber* pick_in_warp(Block& block, int warp, int first_lane) {
  const int first = warp * 32, end = first + lower(32, block.threads - first);
  int thread = first + first_lane;
  for (int i = first; i < end; i++, thread++) {
    if (thread >= end) thread = first;
    if (block.turn[thread].runnable()) return block.fiber[thread];
  }
  return nullptr;
}

// One warp runs as far as it can, then the ready warp of the highest priority. This shows a missing barrier, because
// warps drift as far apart as the barriers allow. With `reshuffle` (schedule random) priorities change and warps are
// preempted.
inline Fiber* pick_greedy(Block& block, bool reshuffle) {
  if (block.current && !(reshuffle && block.random.one_in(256)))
    if (Fiber* f = pick_in_warp(block, block.current->warp, block.current->lane + 1)) return f;
  if (reshuffle && block.random.one_in(4))
    exchange(block.warp_order[block.random.below(block.warp_count)],
             block.warp_order[block.random.below(block.warp_count)]);
  for (int i = 0; i < block.warp_count; i++)
    if (Fiber* f = pick_in_warp(block, block.warp_order[i], 0)) return f;
  return nullptr;
}

// The ready thread of the highest priority: the lanes of one warp drift as far apart as they may.
inline Fiber* pick_lane(Block& block) {
  if (block.random.one_in(512))
    exchange(block.thread_order[block.random.below(block.threads)],
             block.thread_order[block.random.below(block.threads)]);
  for (int i = 0; i < block.threads; i++) {
    const int thread = block.thread_order[i];
    if (block.turn[thread].runnable()) return block.fiber[thread];
  }
  return nullptr;
}

inline Fiber* pick(Block& block) {
  switch (block.request->schedule) {
    case Schedule::round_robin: return pick_round_robin(block);
    case Schedule::greedy: return pick_greedy(block, false);
    case Schedule::random: return pick_greedy(block, true);
    case Schedule::lane: return pick_lane(block);
  }
  return nullptr;
}

inline int describe_wait(const Block& block, const Fiber& f, char* text, size_t room) {
  int n = snprintf(text, room, "%s", f.waits_for);
  if (f.waits_on < 0) return n;
  if (strncmp(f.waits_for, "mbarrier", 8) == 0) {
    for (uint32_t i = 0; i < block.mbarrier_count; i++) {
      const MBarrier& m = block.mbarrier[i];
      if (m.address == f.waits_on)
        n +=
            snprintf(text + n, room - n, " 0x%x (phase %llu, %d of %d arrivals pending, %lld bytes pending)", m.address,
                     static_cast<unsigned long long>(m.phase), m.pending, m.count, static_cast<long long>(m.bytes));
    }
    return n;
  }
  const NamedBarrier& b = block.barrier[f.waits_on];
  int expected = b.expected < 0 ? block.live : b.expected;
  return n + snprintf(text + n, room - n, " %d (%d of %d threads arrived)", static_cast<int>(f.waits_on), b.arrived,
                      expected);
}

// No thread can run and nothing is on its way: reports which threads wait for what.
[[noreturn]] inline void fail_deadlock(Block& block) {
  for (int i = block.threads - 1; turn_of(self()).state == FiberState::done && i >= 0; i--)
    if (block.turn[i].state == FiberState::blocked) blame(block, i, block.fiber[i]->statement);
  char text[1400];
  int n = 0, room = sizeof text;
  bool told[MAX_THREADS] = {};
  for (int i = 0; i < block.threads && n < room - 200; i++) {
    const Fiber& first = *block.fiber[i];
    if (block.turn[i].state != FiberState::blocked || told[i]) continue;
    int waiters = 0;
    for (int j = i; j < block.threads; j++) {
      const Fiber& f = *block.fiber[j];
      if (block.turn[j].state != FiberState::blocked || f.waits_on != first.waits_on ||
          strcmp(f.waits_for, first.waits_for))
        continue;
      told[j] = true;
      waiters++;
    }
    n += snprintf(text + n, room - n, "%s%d thread%s from thread %d on: ", n ? "; " : "", waiters,
                  waiters > 1 ? "s" : "", i);
    n += describe_wait(block, first, text + n, room - n);
  }
  fail(kind::deadlock, "no thread can run. Waiting: %s. Exited: %d", text, block.threads - block.live);
}

// Runs the next thread. Returns when the caller has its next turn.
inline void give_way(Block& block) {
  check_time(block);
  for (;;) {
    if (block.request->delivery == Delivery::random && block.delivery_odds && !block.in_flight.empty() &&
        block.random.one_in(block.delivery_odds))
      deliver_one(block);
    if (Fiber* next = pick(block)) {
      turn_of(*next).state = FiberState::ready;
      if (next != block.current) resume(*next);
      return;
    }
    if (!block.live) leave_block(block);
    if (!deliver_one(block)) fail_deadlock(block);
  }
}

// Waits until *gate is no longer `seen`. what, which: for the deadlock report.
inline void wait_for(Fiber& fiber, const uint64_t* gate, uint64_t seen, const char* what, int64_t which = -1) {
  turn_of(fiber) = {gate, seen, FiberState::blocked};
  fiber.waits_for = what;
  fiber.waits_on = which;
  give_way(*fiber.block);
}

void poll() {
  Fiber& fiber = self();
  Block& block = *fiber.block;
  check_time(block);
  deliver_one(block);
  turn_of(fiber).state = FiberState::ready;
  Fiber* next = pick_round_robin(block);
  if (next == &fiber) sched_yield();
  else resume(*next);
}

}  // namespace emulation
