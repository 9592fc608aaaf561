// What every kernel and wrapper starts from: fixed-width integers, the DEVICE qualifier, dynamic shared memory and
// the tensor map. No toolkit header is needed, neither by NVRTC nor by a host compiler.
#pragma once

#ifdef GPU_ACTORS_EMULATED
#include "emulation/language.cuh"
#else
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
#if defined(_WIN32)
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
typedef long int64_t;
typedef unsigned long uint64_t;
#endif
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif
// Dynamic shared memory, 1024-byte aligned as the 128-byte swizzle, TMA and wgmma need.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
#endif

// Every helper function of a kernel: inlined, private to its file.
#define DEVICE static __device__ __forceinline__
// For a kernel with little arithmetic: the emulated device builds it with few optimisations, in half the time.
#ifdef GPU_ACTORS_EMULATED
#define LITTLE_ARITHMETIC _Pragma("gpu_actors little_arithmetic")
#else
#define LITTLE_ARITHMETIC
#endif
// A wrapper of an instruction. The emulated device inlines only these, so that a fault names the line that calls them.
#ifdef GPU_ACTORS_EMULATED
#define WRAPPER static inline __attribute__((always_inline))
#else
#define WRAPPER DEVICE
#endif

namespace ptx {

// CUtensorMap: opaque to kernels. Pass it by value as a __grid_constant__ parameter, alone or inside Params.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// Element types of the matrix instructions. Operands travel as raw bits.
enum class Element : int { f16, bf16, e4m3, e5m2, tf32 };

}  // namespace ptx
