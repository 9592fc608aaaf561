#include "device.h"

#include "settings.h"

namespace softgpu {
namespace {

thread_local int current = -1;

// cuda.h, CUdevice_attribute
enum Attribute : int {
  max_threads_per_block = 1,
  max_block_x = 2,
  max_block_y = 3,
  max_block_z = 4,
  max_grid_x = 5,
  max_grid_y = 6,
  max_grid_z = 7,
  max_shared_per_block = 8,
  warp_size = 10,
  max_registers_per_block = 12,
  clock_rate = 13,
  multiprocessors = 16,
  concurrent_kernels = 31,
  unified_addressing = 41,
  max_threads_per_multiprocessor = 39,
  capability_major = 75,
  capability_minor = 76,
  max_shared_per_multiprocessor = 81,
  max_registers_per_multiprocessor = 82,
  max_shared_opt_in = 97,
};

int shared_kib_per_multiprocessor() {
  const int capability = settings().capability;
  if (capability >= 90 || capability == 80) return capability >= 90 ? 228 : 164;
  return 100;  // 8.6, 8.9
}

}  // namespace

int device_count() { return settings().devices; }

std::string device_name(int device) {
  return "Software sm_" + std::to_string(settings().capability) + (device ? " " + std::to_string(device) : "");
}

int shared_bytes_opt_in() { return (shared_kib_per_multiprocessor() - 1) << 10; }

int device_attribute(int attribute) {
  switch (attribute) {
    case max_threads_per_block:
    case max_block_x:
    case max_block_y: return MAX_THREADS;
    case max_block_z: return MAX_BLOCK_Z;
    case max_grid_x: return MAX_GRID_X;
    case max_grid_y:
    case max_grid_z: return MAX_GRID_YZ;
    case max_shared_per_block: return STATIC_SHARED_BYTES;
    case warp_size: return 32;
    case max_registers_per_block:
    case max_registers_per_multiprocessor: return REGISTERS;
    case clock_rate: return 2000000;  // kHz; clock64() of the emulation counts as fast
    case multiprocessors: return settings().multiprocessors;
    case concurrent_kernels:
    case unified_addressing: return 1;
    case max_threads_per_multiprocessor: return 2048;
    case capability_major: return settings().capability / 10;
    case capability_minor: return settings().capability % 10;
    case max_shared_per_multiprocessor: return shared_kib_per_multiprocessor() << 10;
    case max_shared_opt_in: return shared_bytes_opt_in();
    default: return 0;
  }
}

int current_device() { return current; }
void set_current_device(int device) { current = device; }

}  // namespace softgpu
