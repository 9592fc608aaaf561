// Worker processes. Each runs one kernel at a time, so that kernels of several streams run at once. A kernel that does
// not end, or that ends its process, does not harm the program.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memory.h"
#include "message.h"

namespace softgpu {

struct Launch {
  std::string library, entry, source;
  std::uint32_t grid[3], block[3], shared_bytes;
  std::vector<std::uint64_t> argument_sizes;
  std::vector<char> arguments;  // one behind the other
};

struct Outcome {
  LaunchReply reply;
  std::vector<TouchedRange> touched;
};

// Runs it to its end. blocks: the device memory that is allocated now. seed: of the order of blocks, warps and threads.
Outcome run(int device, int memory_file, Range span, const Launch& launch, const std::vector<Range>& blocks,
            std::uint64_t seed);

}  // namespace softgpu
