// Words of global memory by which blocks pass work on to each other. The host's processors order more than a GPU does,
// so a plain store instead of a release would work here. But an acquire must read a value from before the launch, or
// one that a release has stored: another value is a race (PTX ISA 8.8).
#pragma once

#include "emulation/order.cuh"

namespace emulation {

struct PassedWord {
  const void* at;
  int value;
  bool unknown;  // CUDA's atomics change it, which may continue what a release began
};
struct PassedWords {
  pthread_mutex_t lock;
  bool unknown;  // after a __threadfence any store may be a release
  int atomics;   // that are changing words now
  List<PassedWord> words[256];

  PassedWord* find(const void* at) {
    for (PassedWord& word : list_of(at))
      if (word.at == at) return &word;
    return nullptr;
  }
  void note(const void* at, int value) {
    if (PassedWord* word = find(at)) word->value = value;
    else list_of(at).push({at, value, false});
  }
  bool is_passed(const void* at, int value) {
    const PassedWord* word = find(at);
    return unknown || atomics || !word || word->unknown || word->value == value;
  }

 private:
  List<PassedWord>& list_of(const void* at) { return words[reinterpret_cast<uintptr_t>(at) / 4 % 256]; }
};

// act(after): returns the word's value, and sets `after` to its value afterwards.
template <class Act>
inline int pass_word(const int* at, bool acquires, bool releases, const char* what, Act&& act) {
  Block& block = *self().block;
  PassedWords& passed = *block.worker->passed;
  if (releases) release_lane(block, self().linear);
  int before, after;
  bool is_passed;
  {
    const Locked locked(block, passed.lock);
    before = act(after);
    is_passed = !acquires || passed.is_passed(at, before);
    passed.note(at, after);
  }
  if (!is_passed)
    fail(kind::race, "%s reads %d, which was stored in this launch by no release: nothing comes before it", what, before);
  if (acquires) acquire_lane(block, self().linear);
  return before;
}

void note_atomic(const void* at, bool is_over) {
  PassedWords& passed = *self().block->worker->passed;
  const Locked locked(*self().block, passed.lock);
  passed.atomics += is_over ? -1 : 1;
  if (PassedWord* word = passed.find(at)) word->unknown = true;
}

void fence_memory(bool for_other_blocks) {
  const Fiber& fiber = self();
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (for_other_blocks) fiber.block->worker->passed->unknown = true;
  release_lane(*fiber.block, fiber.linear);
  acquire_lane(*fiber.block, fiber.linear);
}

}  // namespace emulation
