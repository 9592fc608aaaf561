// Tensor maps: the fields that the emulation reads, in the 128 opaque bytes.
#pragma once

#include <cstdint>

#include "memory.h"

namespace softgpu {

// CUDA Driver API, "Tensor Map Object Management", cuTensorMapEncodeTiled: refuses the same as that function.
Status encode_tensor_map(void* map, int type, std::uint32_t rank, Address address, const std::uint64_t* extent,
                         const std::uint64_t* stride, const std::uint32_t* box, const std::uint32_t* step,
                         int interleave, int swizzle, int promotion, int fill);

}  // namespace softgpu
