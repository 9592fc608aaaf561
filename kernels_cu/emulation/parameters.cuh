// The parameters of a user's kernel, so that its arguments are checked before it is launched.
#pragma once

#include "emulation/launch.cuh"

namespace emulation {

// Writes the size of each parameter; returns how many there are.
template <class... P>
inline uint64_t parameter_bytes(void (*)(P...), uint64_t* bytes) {
  const uint64_t sizes[] = {sizeof(P)..., 0};
  for (uint64_t i = 0; bytes && i < sizeof...(P); i++) bytes[i] = sizes[i];
  return sizeof...(P);
}

}  // namespace emulation

template <class Kernel>
inline uint64_t gpu_actors_parameter_bytes(Kernel kernel, uint64_t* bytes) {
  return emulation::parameter_bytes(kernel, bytes);
}

// Expanded after the kernel, with names that none of its macros has.
#define GPU_ACTORS_PARAMETERS(name)                                                                                          \
  extern "C" __attribute__((__visibility__("default"))) uint64_t gpu_actors_parameters_##name(uint64_t* gpu_actors_bytes) { \
    return gpu_actors_parameter_bytes(name, gpu_actors_bytes);                                                               \
  }
