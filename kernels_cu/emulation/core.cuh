// The base of the emulation: C headers only (no C++ runtime is linked), a growable list, random numbers, limits.
// Every kernel's own unit reads this, so it includes little: system.cuh is for the executor.
#pragma once

#include <float.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "emulation/overloads.cuh"

#if defined(GPU_ACTORS_CONTRACTION) && !defined(__FMA__) && !defined(__ARM_FEATURE_FMA)
#error "contraction needs a processor with fused multiply-add instructions"
#endif

namespace emulation {

constexpr uint32_t MAX_THREADS = 1024;  // of a block
constexpr uint32_t MAX_WARPS = MAX_THREADS / 32;
constexpr size_t STACK_BYTES = 256u << 10;        // of a fiber; a power of two, and stacks are aligned to it
constexpr size_t STACK_GUARD = 4096;              // inaccessible bytes at the low end of each stack
constexpr uint32_t MAX_SHARED_BYTES = 232448;     // 227 KiB, what a block may ask for on sm_90
constexpr uint32_t SHARED_BASE = 1024;            // 32-bit address of the first dynamic byte (sm_90 reserves 1 KiB)
constexpr uint32_t STATIC_SHARED_BASE = 0x40000;  // 32-bit address of the first static __shared__ byte
constexpr uint32_t MAX_FRAMES = 24;                // calls that a fault remembers
constexpr uint8_t POISON = 0xFF;                  // bytes that are a NaN in every floating-point format, and -1
constexpr uint8_t CANARY = 0xC5;  // fills what lies around dynamic shared memory and is checked at the end

enum class Delivery : uint32_t { late, eager, random };
enum class Schedule : uint32_t { round_robin, greedy, random, lane };
enum class Arithmetic : uint32_t { nearest, hardware };

// EmulationFault documents each (gpu_actors/devices/emulation/runtime.py).
namespace kind {
constexpr const char* out_of_bounds = "out_of_bounds";
constexpr const char* misaligned = "misaligned";
constexpr const char* deadlock = "deadlock";
constexpr const char* divergence = "divergence";
constexpr const char* barrier = "barrier";
constexpr const char* mbarrier = "mbarrier";
constexpr const char* race = "race";
constexpr const char* unfenced = "unfenced";
constexpr const char* leftover = "leftover";
constexpr const char* descriptor = "descriptor";
constexpr const char* argument = "argument";
constexpr const char* stack_overflow = "stack_overflow";
constexpr const char* time_limit = "time_limit";
constexpr const char* trap = "trap";
constexpr const char* assembly = "assembly";
}  // namespace kind

// A growable array of plain values. Zero bytes are an empty list; memory goes back only through release().
template <class T>
struct List {
  T* items;
  uint32_t size, capacity;

  T& operator[](uint32_t i) { return items[i]; }
  const T& operator[](uint32_t i) const { return items[i]; }
  T* begin() { return items; }
  T* end() { return items + size; }
  T& back() { return items[size - 1]; }
  bool empty() const { return size == 0; }
  void clear() { size = 0; }
  T& push(const T& value) {
    if (size == capacity) {
      capacity = capacity ? 2 * capacity : 8;
      items = static_cast<T*>(__builtin_realloc(items, capacity * sizeof(T)));
      if (!items) __builtin_abort();
    }
    items[size] = value;
    return items[size++];
  }
  void erase(uint32_t at, uint32_t count = 1) {
    __builtin_memmove(items + at, items + at + count, (size - at - count) * sizeof(T));
    size -= count;
  }
  void release() {
    __builtin_free(items);
    items = nullptr;
    size = capacity = 0;
  }
};

// xorshift64*, seeded through splitmix64 so that neighbouring seeds give unrelated streams.
struct Random {
  uint64_t state;

  void seed(uint64_t a, uint64_t b) {
    uint64_t z = a * 0x9E3779B97F4A7C15ull + b + 0x2545F4914F6CDD1Dull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    state = (z ^ z >> 31) | 1;
  }
  uint64_t next() {
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return (state * 0x2545F4914F6CDD1Dull) >> 16;
  }
  uint32_t below(uint32_t n) { return static_cast<uint32_t>(next() % n); }
  bool one_in(uint32_t n) { return below(n) == 0; }
};

template <class A>
inline A lower(A a, A b) {
  return b < a ? b : a;
}
template <class A>
inline A upper(A a, A b) {
  return a < b ? b : a;
}
template <class A>
inline void exchange(A& a, A& b) {
  A t = a;
  a = b;
  b = t;
}

}  // namespace emulation
