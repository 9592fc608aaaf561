// Tensor copies.
#pragma once

#include "emulation/bulk.cuh"

namespace emulation {

inline uint32_t box_bytes(const TensorMapFields& map) {
  uint32_t bytes = map.element_bytes;
  for (int d = 0; d < map.rank; d++) bytes *= map.box[d];
  return bytes;
}

// Calls visit(row of the box in shared memory before swizzling, offset of that row in the box, element 0 of that row in
// global memory, or null if the row lies outside the tensor).
template <class Visit>
inline void for_each_row(const TensorMapFields& map, const int32_t* coordinate, uint32_t shared, Visit&& visit) {
  uint32_t row_bytes = uint32_t(map.box[0]) * map.element_bytes, rows = box_bytes(map) / row_bytes;
  int64_t index[5] = {};
  for (uint32_t r = 0; r < rows; r++) {
    bool inside = true;
    char* global = map.base;
    for (int d = 1; d < map.rank; d++) {
      int64_t at = coordinate[d] + index[d];
      inside &= at >= 0 && at < static_cast<int64_t>(map.extent[d]);
      global += at * static_cast<int64_t>(map.stride[d - 1]);
    }
    visit(shared + r * row_bytes, r * row_bytes, inside ? global : nullptr);
    for (int d = 1; d < map.rank; d++) {
      if (++index[d] < map.box[d]) break;
      index[d] = 0;
    }
  }
}

// The part of a row that lies inside the tensor: bytes [first, last) of the box's row.
struct RowPart {
  int64_t first, last;
};
inline RowPart part_inside(const TensorMapFields& map, int32_t coordinate) {
  int64_t es = map.element_bytes, box = map.box[0], extent = static_cast<int64_t>(map.extent[0]);
  int64_t first = upper<int64_t>(0, -int64_t(coordinate)), last = lower<int64_t>(box, extent - coordinate);
  return {first * es, upper(first, last) * es};
}

// The part of a row that a store or reduction writes, from a place that check_place lets pass. If the tensor's row ends
// within 16 bytes, these are written whole: bytes past the end get what shared memory holds for them. This was measured
// on an H100; the PTX ISA does not say so.
inline RowPart part_written(const TensorMapFields& map, int32_t coordinate) {
  const int64_t bytes = static_cast<int64_t>(map.extent[0]) * map.element_bytes;
  const int64_t end = (bytes + 15) / 16 * 16 - int64_t(coordinate) * map.element_bytes;
  return {0, upper<int64_t>(0, lower<int64_t>(int64_t(map.box[0]) * map.element_bytes, end))};
}

inline void land_tensor(const InFlight& load) {
  const TensorMapFields& map = load.map;
  const uint32_t row_bytes = uint32_t(map.box[0]) * map.element_bytes;
  const RowPart part = part_inside(map, load.coordinate[0]);
  const int64_t offset = int64_t(load.coordinate[0]) * map.element_bytes;
  for_each_row(map, load.coordinate, load.shared, [&](uint32_t row, uint32_t, const char* global) {
    char data[1024];  // a row has at most 256 elements of 4 bytes
    memset(data, 0, row_bytes);
    if (global && part.first < part.last) {
      const char* source = global + offset + part.first;
      check_global(source, part.last - part.first, "TMA load", 1);
      memcpy(data + part.first, source, part.last - part.first);
    }
    for (uint32_t at = 0; at < row_bytes; at += 16)
      async_write(swizzled(row + at, map.swizzle), data + at, 16, "TMA load");
  });
}

inline void write_tensor(const BulkStore& store) {
  const RowPart part = part_written(store.map, store.coordinate[0]);
  const int64_t offset = int64_t(store.coordinate[0]) * store.map.element_bytes;
  if (part.first >= part.last) return;
  for_each_row(store.map, store.coordinate, store.shared, [&](uint32_t, uint32_t at, char* global) {
    if (!global) return;
    char* destination = global + offset + part.first;
    check_global(destination, part.last - part.first, "TMA store", 1);
    write_global(destination, store.snapshot + at + part.first, uint32_t(part.last - part.first), store);
  });
}

// Parameters lie on the thread's own stack here, so the map is copied at issue.
inline const TensorMapFields& read_map(const ptx::TensorMap* map, int rank, uint32_t shared, const char* operation) {
  if (reinterpret_cast<uintptr_t>(map) % 64)
    fail(kind::misaligned, "%s: the tensor map is not 64-byte aligned", operation);
  const TensorMapFields& fields = *reinterpret_cast<const TensorMapFields*>(map);
  if (fields.magic != TENSOR_MAP_MAGIC)
    fail(kind::descriptor, "%s: the tensor map was not made by encode_tensor_map", operation);
  if (fields.rank != rank)
    fail(kind::descriptor, "%s: %d coordinates for a tensor map of %d dimensions", operation, rank, fields.rank);
  const uint32_t alignment = fields.swizzle == 1 ? 1024 : fields.swizzle == 2 ? 512 : fields.swizzle == 3 ? 256 : 128;
  const uint32_t row_bytes = uint32_t(fields.box[0]) * fields.element_bytes;
  if (fields.swizzle && row_bytes * 8 != alignment)
    fail(kind::descriptor, "%s: rows of %u bytes in a swizzle of %u: where they lie is documented nowhere", operation,
         row_bytes, alignment / 8);
  shared_pointer(shared, box_bytes(fields), operation, alignment);
  return fields;
}

// Both rules were measured on an H100, where the launch ends with an illegal instruction, even if the box lies wholly
// outside of the tensor. The PTX ISA has neither; the CUDA C++ Programming Guide has that of stores ("the top left corner
// cannot have any negative indices").
inline void check_place(const TensorMapFields& map, const int32_t* coordinate, bool writes, const char* operation) {
  for (int d = 0; d < map.rank; d++)
    if (writes && coordinate[d] < 0)
      fail(kind::argument, "%s: coordinate %d of dimension %d is negative", operation, coordinate[d], d);
  const int64_t first = int64_t(coordinate[0]) * map.element_bytes;
  if (first % 16)
    fail(kind::misaligned, "%s: coordinate %d of dimension 0 is byte %lld of a row, no multiple of 16", operation,
         coordinate[0], static_cast<long long>(first));
}

// part: of each row, what is read or written in global memory.
inline void check_tensor_view(const TensorMapFields& map, const int32_t* coordinate, uint32_t shared, RowPart part,
                              const char* what) {
  if (!self().block->stores_unfenced) return;
  const int64_t offset = int64_t(coordinate[0]) * map.element_bytes + part.first;
  for_each_row(map, coordinate, shared, [&](uint32_t, uint32_t, const char* global) {
    const uint32_t bytes = uint32_t(part.last - part.first);
    if (global && bytes) check_global_view(global + offset, bytes, check_global(global + offset, bytes, what, 1), what);
  });
}

inline void issue_tensor_load(uint32_t destination, const ptx::TensorMap* map, uint32_t barrier, int rank,
                              const int* coordinate, ptx::CachePolicy policy) {
  constexpr const char* operation = "TMA load";
  check_policy(policy, operation);
  InFlight load{};
  load.kind = InFlight::tensor;
  load.map = read_map(map, rank, destination, operation);
  check_load_barrier(barrier, operation);
  load.bytes = box_bytes(load.map);
  check_place(load.map, coordinate, false, operation);
  async_claim(destination, load.bytes, operation);
  for (int d = 0; d < rank; d++) load.coordinate[d] = coordinate[d];
  check_tensor_view(load.map, load.coordinate, destination, part_inside(load.map, coordinate[0]), operation);
  load.shared = destination;
  load.mbarrier = barrier;
  send(load);
}

inline void issue_tensor_store(const ptx::TensorMap* map, uint32_t source, int rank, const int* coordinate,
                               bool reduce) {
  const char* operation = reduce ? "TMA reduction" : "TMA store";
  BulkStore store{};
  store.map = read_map(map, rank, source, operation);
  if (reduce && !store.map.number) fail(kind::descriptor, "TMA reduction: the tensor map's type cannot be added");
  store.bytes = box_bytes(store.map);
  check_place(store.map, coordinate, true, operation);
  for (int d = 0; d < rank; d++) store.coordinate[d] = coordinate[d];
  check_tensor_view(store.map, store.coordinate, source, part_written(store.map, coordinate[0]), operation);
  store.shared = source;
  store.reduce = reduce;
  start_store(store, operation);
}

}  // namespace emulation
