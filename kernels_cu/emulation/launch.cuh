// Makes kernels callable with arguments given by address. The executor runs them (executor.cuh).
#pragma once

#include "emulation/state.cuh"

namespace emulation {

// 0: every block ran to its end. 1: *request.fault says what the first failing block found, or which arguments are not
// of the kernel's `count` parameters with these sizes (grid.cuh). runtime.py has checked the other sizes.
int launch(Request& request, uint64_t count, const uint64_t* bytes, void (*call)(void*, void* const*), void* kernel);

// ---- entry points: the arguments arrive as one pointer each
template <size_t... I>
struct Indices {};
template <size_t N, size_t... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <size_t... I>
struct MakeIndices<0, I...> {
  typedef Indices<I...> type;
};

template <class... P>
struct Entry {
  template <size_t... I>
  static void pass(void (*kernel)(P...), void* const* arguments, Indices<I...>) {
    kernel(*static_cast<const P*>(arguments[I])...);
  }
  static void call(void* kernel, void* const* arguments) {
    pass(reinterpret_cast<void (*)(P...)>(kernel), arguments, typename MakeIndices<sizeof...(P)>::type{});
  }
};

template <class... P>
inline int launch_kernel(Request& request, void (*kernel)(P...)) {
  const uint64_t bytes[] = {sizeof(P)..., 0};
  return launch(request, sizeof...(P), bytes, Entry<P...>::call, reinterpret_cast<void*>(kernel));
}

}  // namespace emulation

typedef emulation::Request gpu_actors_request;
template <class Kernel>
inline int gpu_actors_launch(gpu_actors_request* request, Kernel kernel) {
  return emulation::launch_kernel(*request, kernel);
}

// Expanded after the kernel, with names that none of its macros has.
#define GPU_ACTORS_ENTRY(name)                                                                                  \
  extern "C" __attribute__((__visibility__("default"))) int gpu_actors_launch_##name(gpu_actors_request* gpu_actors_r) { \
    return gpu_actors_launch(gpu_actors_r, name);                                                               \
  }
