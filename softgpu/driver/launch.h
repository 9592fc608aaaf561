// A kernel as a step of a stream.
#pragma once

#include <cstdint>

#include "module.h"
#include "stream.h"

namespace softgpu {

// Copies the arguments. Expects `state_lock`.
Step launch_step(const Function& function, const std::uint32_t grid[3], const std::uint32_t block[3],
                 std::uint32_t shared_bytes, void* const* arguments);

}  // namespace softgpu
