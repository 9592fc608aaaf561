// Settings from the environment, and the faults that a test asks for.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace softgpu {

struct Settings {
  int devices = 1;           // SOFTGPU_DEVICES
  int capability = 90;       // SOFTGPU_CAPABILITY: 90 for 9.0
  int multiprocessors = 2;   // SOFTGPU_MULTIPROCESSORS: each is one thread of a launch's worker
  std::size_t memory = 0;    // SOFTGPU_MEMORY_MIB, of each device
  std::uint64_t seed = 0;    // SOFTGPU_SEED: of every order that CUDA leaves open
};
const Settings& settings();

// Faults on demand. Each counter counts down the calls of its kind; the one that reaches zero has the fault.
struct Faults {
  std::atomic<long> allocation{0};  // this cuMemAlloc returns out_of_memory
  std::atomic<long> pinned{0};      // this cuMemHostAlloc returns out_of_memory
  std::atomic<long> launch{0};      // this kernel ends with launch_status
  std::atomic<int> launch_status{0};
  std::atomic<long> event{0};  // this record of an event never completes
  std::atomic<long> copy{0};   // this copy takes copy_seconds
  std::atomic<double> copy_seconds{0};
};
extern Faults faults;

// Counts down. True if this call has the fault.
inline bool strikes(std::atomic<long>& counter) { return counter > 0 && --counter == 0; }

}  // namespace softgpu
