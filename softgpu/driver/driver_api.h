// Copies and fills, as both the driver's and the runtime's functions make them.
#pragma once

#include <cstddef>

#include "memory.h"

namespace softgpu {

Status copy_async(Address to, Address from, std::size_t bytes, void* stream);
Status fill_async(Address at, unsigned char value, std::size_t bytes, void* stream);

}  // namespace softgpu
