// What a kernel's own unit uses of the emulation besides its state: calls into the executor, which is compiled once.
#pragma once

#include "emulation/state.cuh"

namespace emulation {

// The fiber that runs here: its record lies at the top of the stack in use.
__attribute__((always_inline)) inline Fiber& self() {
  return *fiber_on(reinterpret_cast<uintptr_t>(__builtin_frame_address(0)) & ~(STACK_BYTES - 1));
}

inline unsigned char* dynamic_shared() { return reinterpret_cast<unsigned char*>(self().block->shared); }

// Reports a fault of the running thread and ends the launch (fiber.cuh).
[[noreturn]] __attribute__((format(printf, 2, 3), noinline)) void fail(const char* what, const char* format, ...);

// One round of a loop that polls memory: all others, other blocks included, get a turn (scheduler.cuh).
void poll();

// ---- passed_words.cuh
void fence_memory(bool for_other_blocks);  // __threadfence and similar
void note_atomic(const void* at, bool is_over);  // before and after it changes a word

// ---- collective.cuh
// Brings the running thread to a collective. The last lane to arrive gets it, computes for all and calls leave(); the
// others get null when that has happened. argument: where the caller's argument lies.
Rendezvous* join(const char* operation, uint32_t mask, void* argument);
void leave(Rendezvous& rendezvous);
void sync_warp(uint32_t mask);

// bar.sync / bar.arrive. threads: how many arrivals complete the barrier, -1: all live threads (__syncthreads).
void arrive_at_barrier(int number, int threads, bool wait);
int count_votes(bool vote);  // of all threads of the block
long long read_clock();

// Waits for every lane of mask; the last one calls compute(arguments), arguments[lane] being that lane's argument.
template <class Argument, class Compute>
inline void collective(const char* operation, uint32_t mask, Argument& argument, Compute&& compute) {
  if (Rendezvous* all = join(operation, mask, &argument)) {
    compute(reinterpret_cast<Argument**>(all->argument));
    leave(*all);
  }
}

}  // namespace emulation
