// The messages of the driver and a worker process, over a socket: a launch, and its outcome.
#pragma once

#include <cstdint>

namespace softgpu {

// Followed by: the library's path, the kernel's name, the arguments' sizes (8 bytes each), the arguments, the blocks of
// device memory (begin, end).
struct LaunchMessage {
  std::uint32_t grid[3], block[3];
  std::uint32_t shared_bytes;
  std::uint32_t delivery, schedule, threads;
  std::uint64_t seed;
  std::uint32_t library_length, entry_length;
  std::uint32_t argument_count, argument_bytes;
  std::uint32_t block_count;
};

// Followed by the ranges of device memory that the kernel has accessed.
struct LaunchReply {
  std::int32_t failed;
  char kind[24];
  std::uint32_t block[3];
  std::int32_t thread;
  std::uint64_t address;
  // As in emulation::Fault.
  std::uint32_t frame_count;
  std::uint64_t frames[24], issued;
  char text[1600];
  std::uint32_t range_count;
};

struct TouchedRange {
  std::uint64_t begin, end;
  std::uint32_t read, written;
};

}  // namespace softgpu
