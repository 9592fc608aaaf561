// CUDA C++ itself for a host compiler: qualifiers, vector types, built-in variables, barriers, shuffles and votes.
// Kernels compile unchanged; the wrappers in ptx/ bring the rest.
#pragma once

#include "emulation/calls.cuh"

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static thread_local
// A function that is not inlined is compiled once. The compiler fuses no product with a sum in another function.
#ifdef GPU_ACTORS_CONTRACTION
#define __forceinline__ inline __attribute__((always_inline))
#else
#define __forceinline__ inline
#endif
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define DYNAMIC_SHARED(name) unsigned char* name = ::emulation::dynamic_shared()

// ---- vector types, with CUDA's sizes and alignments
#define EMULATED_VECTOR(T, name, a2, a4)                                    \
  struct name##1 { T x; };                                                  \
  struct alignas(a2) name##2 { T x, y; };                                   \
  struct name##3 { T x, y, z; };                                            \
  struct alignas(a4) name##4 { T x, y, z, w; };                             \
  static inline name##1 make_##name##1(T x) { return {x}; }                 \
  static inline name##2 make_##name##2(T x, T y) { return {x, y}; }         \
  static inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
  static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATED_VECTOR(signed char, char, 2, 4)
EMULATED_VECTOR(unsigned char, uchar, 2, 4)
EMULATED_VECTOR(short, short, 4, 8)
EMULATED_VECTOR(unsigned short, ushort, 4, 8)
EMULATED_VECTOR(int, int, 8, 16)
EMULATED_VECTOR(float, float, 8, 16)
EMULATED_VECTOR(long long, longlong, 16, 16)
EMULATED_VECTOR(unsigned long long, ulonglong, 16, 16)
EMULATED_VECTOR(double, double, 16, 16)
#undef EMULATED_VECTOR
struct uint1 {
  unsigned int x;
};
struct alignas(8) uint2 {
  unsigned int x, y;
};
struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};
static inline uint1 make_uint1(unsigned int x) { return {x}; }
static inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }
static inline uint3 make_uint3(unsigned int x, unsigned int y, unsigned int z) { return {x, y, z}; }
static inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) { return {x, y, z, w}; }

// ---- built-in variables
// The macros are expanded in the kernel, so they use names that no macro of a kernel has.
inline auto& gpu_actors_thread_index() { return emulation::self().index; }
inline auto& gpu_actors_block_index() { return emulation::self().block->index; }
inline auto& gpu_actors_block_dim() { return emulation::self().block->dim; }
inline auto& gpu_actors_grid_dim() { return emulation::self().block->grid; }
#define threadIdx (::gpu_actors_thread_index())
#define blockIdx (::gpu_actors_block_index())
#define blockDim (::gpu_actors_block_dim())
#define gridDim (::gpu_actors_grid_dim())
constexpr int warpSize = 32;

// ---- barriers and fences
inline void __syncthreads() { emulation::arrive_at_barrier(0, -1, true); }
inline void __syncwarp(unsigned mask = ~0u) { emulation::sync_warp(mask); }
inline void __threadfence_block() { emulation::fence_memory(false); }
inline void __threadfence() { emulation::fence_memory(true); }
inline void __threadfence_system() { emulation::fence_memory(true); }
[[noreturn]] inline void __trap() { emulation::fail(emulation::kind::trap, "__trap()"); }
inline void __nanosleep(unsigned) { emulation::poll(); }

inline long long clock64() { return emulation::read_clock(); }

namespace emulation {

template <class T>
struct Shuffle {
  T value, result;
  int source;
};

template <class T>
inline T shuffle(const char* operation, unsigned mask, T value, int source) {
  Shuffle<T> mine{value, value, source};
  uint32_t present = mask & self().block->warp[self().warp].lanes;
  collective(operation, mask, mine, [&](Shuffle<T>** lane) {
    for (int i = 0; i < 32; i++) {
      if (!(present >> i & 1)) continue;
      int from = lane[i]->source;
      if (!(present >> from & 1))
        fail(kind::divergence, "%s: lane %d reads lane %d, which is not in mask 0x%x", operation, i, from, mask);
      lane[i]->result = lane[from]->value;
    }
  });
  return mine.result;
}

template <class T, class Combine>
inline T reduce(const char* operation, unsigned mask, T value, Combine&& combine) {
  Shuffle<T> mine{value, value, 0};
  uint32_t present = mask & self().block->warp[self().warp].lanes;
  collective(operation, mask, mine, [&](Shuffle<T>** lane) {
    bool first = true;
    T all{};
    for (int i = 0; i < 32; i++) {
      if (!(present >> i & 1)) continue;
      all = first ? lane[i]->value : combine(all, lane[i]->value);
      first = false;
    }
    for (int i = 0; i < 32; i++)
      if (present >> i & 1) lane[i]->result = all;
  });
  return mine.result;
}

inline unsigned ballot(const char* operation, unsigned mask, bool vote) {
  unsigned mine = vote ? 1u << self().lane : 0u;
  return reduce(operation, mask, mine, [](unsigned a, unsigned b) { return a | b; });
}

}  // namespace emulation

// ---- shuffles; width: lanes of a segment, a power of two
template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  int lane = emulation::self().lane;
  return emulation::shuffle("__shfl_sync", mask, value, (lane & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  int lane = emulation::self().lane, from = lane ^ lanes;
  if ((from & ~(width - 1)) > (lane & ~(width - 1))) from = lane;
  return emulation::shuffle("__shfl_xor_sync", mask, value, from);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  int lane = emulation::self().lane, from = lane + static_cast<int>(delta);
  if ((lane & (width - 1)) + static_cast<int>(delta) >= width) from = lane;
  return emulation::shuffle("__shfl_down_sync", mask, value, from);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  int lane = emulation::self().lane, from = lane - static_cast<int>(delta);
  if ((lane & (width - 1)) < static_cast<int>(delta)) from = lane;
  return emulation::shuffle("__shfl_up_sync", mask, value, from);
}

// ---- votes and integer reductions
inline unsigned __ballot_sync(unsigned mask, int p) { return emulation::ballot("__ballot_sync", mask, p != 0); }
inline int __any_sync(unsigned mask, int p) { return emulation::ballot("__any_sync", mask, p != 0) != 0; }
inline int __all_sync(unsigned mask, int p) { return emulation::ballot("__all_sync", mask, p == 0) == 0; }
template <class T>
inline T __reduce_add_sync(unsigned mask, T v) {
  return emulation::reduce("__reduce_add_sync", mask, v, [](T a, T b) { return static_cast<T>(a + b); });
}
template <class T>
inline T __reduce_max_sync(unsigned mask, T v) {
  return emulation::reduce("__reduce_max_sync", mask, v, [](T a, T b) { return emulation::upper(a, b); });
}
template <class T>
inline T __reduce_min_sync(unsigned mask, T v) {
  return emulation::reduce("__reduce_min_sync", mask, v, [](T a, T b) { return emulation::lower(a, b); });
}

// ---- votes of the whole block
inline int __syncthreads_count(int p) { return emulation::count_votes(p != 0); }
inline int __syncthreads_or(int p) { return emulation::count_votes(p != 0) != 0; }
inline int __syncthreads_and(int p) { return emulation::count_votes(p == 0) == 0; }

#include "emulation/approximation.cuh"
#include "emulation/assembly/statement.cuh"
#include "emulation/intrinsics.cuh"
