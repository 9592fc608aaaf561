#include "tensor_map.h"

#include <cstring>
#include <iterator>

#include "emulation/state.cuh"  // of kernels_cu

namespace softgpu {
namespace {

struct Element {
  std::uint8_t bytes, number;  // number: how a reduction adds, as in TensorMapFields
};
// By CUtensorMapDataType: uint8, uint16, uint32, int32, uint64, int64, float16, float32, float64, bfloat16.
constexpr Element ELEMENTS[] = {{1, 0}, {2, 0}, {4, 4}, {4, 4}, {8, 0}, {8, 0}, {2, 2}, {4, 1}, {8, 0}, {2, 3}};
// By CUtensorMapSwizzle: the number in the fields, and the longest innermost row in bytes.
constexpr std::uint8_t SWIZZLES[] = {0, 3, 2, 1};
constexpr std::uint32_t LONGEST[] = {~0u, 32, 64, 128};

}  // namespace

Status encode_tensor_map(void* map, int type, std::uint32_t rank, Address address, const std::uint64_t* extent,
                         const std::uint64_t* stride, const std::uint32_t* box, const std::uint32_t* step,
                         int interleave, int swizzle, int promotion, int fill) {
  if (reinterpret_cast<std::uintptr_t>(map) % 64 || rank < 1 || rank > 5 || !address || address % 16)
    return invalid_value;
  if (type < 0 || type >= static_cast<int>(std::size(ELEMENTS)) || swizzle < 0 || swizzle > 3) return invalid_value;
  if (promotion < 0 || promotion > 3) return invalid_value;
  if (interleave || fill) return not_supported;  // CUDA has them, the emulation does not
  const Element element = ELEMENTS[type];
  emulation::TensorMapFields fields{};
  fields.magic = emulation::TENSOR_MAP_MAGIC;
  fields.base = reinterpret_cast<char*>(address);
  fields.rank = static_cast<std::uint8_t>(rank);
  fields.element_bytes = element.bytes;
  fields.number = element.number;
  fields.swizzle = SWIZZLES[swizzle];
  for (std::uint32_t d = 0; d < rank; d++) {
    if (!extent[d] || extent[d] > std::uint64_t{1} << 32 || !box[d] || box[d] > 256 || !step[d] || step[d] > 8)
      return invalid_value;
    if (step[d] != 1) return not_supported;
    fields.extent[d] = extent[d];
    fields.box[d] = static_cast<std::uint16_t>(box[d]);
    if (d + 1 < rank && (stride[d] % 16 || stride[d] >= std::uint64_t{1} << 40)) return invalid_value;
    if (d + 1 < rank) fields.stride[d] = stride[d];
  }
  for (std::uint32_t d = rank; d < 5; d++) fields.box[d] = 1;
  const std::uint32_t row = box[0] * element.bytes;
  if (row % 16 || row > LONGEST[swizzle]) return invalid_value;
  std::memset(map, 0, 128);
  std::memcpy(map, &fields, sizeof fields);
  return success;
}

}  // namespace softgpu
