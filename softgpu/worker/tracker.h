// Which device memory a kernel accesses: each page of a block is inaccessible until the first access to it.
#pragma once

#include <cstdint>
#include <vector>

#include "../driver/message.h"

namespace softgpu {

// Maps the memory file, inaccessible, at the addresses that the program sees.
void map_device(int file, std::uint64_t begin, std::uint64_t bytes);

// From now on these blocks (begin, end) may be accessed, and nothing else.
void start_tracking(const std::vector<std::uint64_t>& blocks);

// What has been accessed since.
std::vector<TouchedRange> stop_tracking();

}  // namespace softgpu
