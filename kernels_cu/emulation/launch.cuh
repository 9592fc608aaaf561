// Makes kernels callable with arguments given by address. What runs them is in the executor (executor.cuh).
#pragma once

#include "emulation/state.cuh"

namespace emulation {

// 0: every block ran to its end. 1: *request.fault says what the first failing block found. Sizes were checked by
// runtime.py.
int launch(Request& request, void (*call)(void*, void* const*), void* kernel);

// A fault of the launch as a whole.
__attribute__((format(printf, 3, 4))) inline int refuse(Request& request, const char* what, const char* format, ...) {
  Fault& fault = *request.fault;
  memset(&fault, 0, sizeof fault);
  fault.thread = fault.buffer = -1;
  snprintf(fault.kind, sizeof fault.kind, "%s", what);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(fault.text, sizeof fault.text, format, arguments);
  va_end(arguments);
  return 1;
}

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
  if (request.argument_count != sizeof...(P))
    return refuse(request, kind::argument, "%u arguments for a kernel that takes %zu", request.argument_count,
                  sizeof...(P));
  for (uint32_t i = 0; i < sizeof...(P); i++) {
    const unsigned long long given = request.argument_bytes[i], taken = bytes[i];
    if (given != taken)
      return refuse(request, kind::argument, "argument %u has %llu bytes, the kernel takes %llu", i, given, taken);
  }
  return launch(request, Entry<P...>::call, reinterpret_cast<void*>(kernel));
}

}  // namespace emulation

#define GPU_ACTORS_ENTRY(name)                                                                            \
  extern "C" __attribute__((visibility("default"))) int gpu_actors_launch_##name(emulation::Request* r) { \
    return emulation::launch_kernel(*r, name);                                                            \
  }
