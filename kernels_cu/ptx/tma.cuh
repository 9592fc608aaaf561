// Tensor copies (TMA, sm_90): one thread moves a box of a tensor of 1 to 5 dimensions. Coordinates are elements,
// innermost dimension first. A box that reaches over an edge reads zeros there, and a load counts its full bytes off
// the mbarrier anyway. It writes nothing there, except the rest of 16 bytes that a row ends within. The innermost
// coordinate is at a multiple of 16 bytes, and no coordinate of a store is negative: otherwise the launch ends with an
// illegal instruction on an H100. The shared box starts at a multiple of 128 bytes (of 256, 512, 1024 with the 32, 64,
// 128-byte swizzle). Stores and reductions are committed and waited for with bulk_commit and bulk_wait (ptx/bulk.cuh).
#pragma once

#include "ptx/bulk.cuh"

namespace ptx {

// Prefetches the map itself, before its first use.
WRAPPER void tma_prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// ---- loads: global to shared memory, counted on the mbarrier
#define PTX_TENSOR_LOAD(rank, coordinates) \
  "cp.async.bulk.tensor." rank             \
  ".shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, " coordinates "], [%2], %3;"

WRAPPER void tma_load(uint32_t destination, const TensorMap* map, uint32_t barrier, int c0,
                     CachePolicy policy = CachePolicy::evict_normal) {
  asm volatile(PTX_TENSOR_LOAD("1d", "{%4}")::"r"(destination), "l"(map), "r"(barrier),
               "l"(static_cast<uint64_t>(policy)), "r"(c0)
               : "memory");
}
WRAPPER void tma_load(uint32_t destination, const TensorMap* map, uint32_t barrier, int c0, int c1,
                     CachePolicy policy = CachePolicy::evict_normal) {
  asm volatile(PTX_TENSOR_LOAD("2d", "{%4, %5}")::"r"(destination), "l"(map), "r"(barrier),
               "l"(static_cast<uint64_t>(policy)), "r"(c0), "r"(c1)
               : "memory");
}
WRAPPER void tma_load(uint32_t destination, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2,
                     CachePolicy policy = CachePolicy::evict_normal) {
  asm volatile(PTX_TENSOR_LOAD("3d", "{%4, %5, %6}")::"r"(destination), "l"(map), "r"(barrier),
               "l"(static_cast<uint64_t>(policy)), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}
WRAPPER void tma_load(uint32_t destination, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2, int c3,
                     CachePolicy policy = CachePolicy::evict_normal) {
  asm volatile(PTX_TENSOR_LOAD("4d", "{%4, %5, %6, %7}")::"r"(destination), "l"(map), "r"(barrier),
               "l"(static_cast<uint64_t>(policy)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
WRAPPER void tma_load(uint32_t destination, const TensorMap* map, uint32_t barrier, int c0, int c1, int c2, int c3,
                     int c4, CachePolicy policy = CachePolicy::evict_normal) {
  asm volatile(PTX_TENSOR_LOAD("5d", "{%4, %5, %6, %7, %8}")::"r"(destination), "l"(map), "r"(barrier),
               "l"(static_cast<uint64_t>(policy)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}
#undef PTX_TENSOR_LOAD

// ---- stores: shared to global memory
#define PTX_TENSOR_STORE(rank, coordinates) \
  "cp.async.bulk.tensor." rank ".global.shared::cta.tile.bulk_group [%0, " coordinates "], [%1];"

WRAPPER void tma_store(const TensorMap* map, uint32_t source, int c0) {
  asm volatile(PTX_TENSOR_STORE("1d", "{%2}")::"l"(map), "r"(source), "r"(c0) : "memory");
}
WRAPPER void tma_store(const TensorMap* map, uint32_t source, int c0, int c1) {
  asm volatile(PTX_TENSOR_STORE("2d", "{%2, %3}")::"l"(map), "r"(source), "r"(c0), "r"(c1) : "memory");
}
WRAPPER void tma_store(const TensorMap* map, uint32_t source, int c0, int c1, int c2) {
  asm volatile(PTX_TENSOR_STORE("3d", "{%2, %3, %4}")::"l"(map), "r"(source), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
WRAPPER void tma_store(const TensorMap* map, uint32_t source, int c0, int c1, int c2, int c3) {
  asm volatile(PTX_TENSOR_STORE("4d", "{%2, %3, %4, %5}")::"l"(map), "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
WRAPPER void tma_store(const TensorMap* map, uint32_t source, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(PTX_TENSOR_STORE("5d", "{%2, %3, %4, %5, %6}")::"l"(map), "r"(source), "r"(c0), "r"(c1), "r"(c2),
               "r"(c3), "r"(c4)
               : "memory");
}
#undef PTX_TENSOR_STORE

// ---- reductions: shared memory is added to global memory, element by element, in the tensor map's type
#define PTX_TENSOR_REDUCE(rank, coordinates) \
  "cp.reduce.async.bulk.tensor." rank ".global.shared::cta.add.tile.bulk_group [%0, " coordinates "], [%1];"

WRAPPER void tma_reduce_add(const TensorMap* map, uint32_t source, int c0) {
  asm volatile(PTX_TENSOR_REDUCE("1d", "{%2}")::"l"(map), "r"(source), "r"(c0) : "memory");
}
WRAPPER void tma_reduce_add(const TensorMap* map, uint32_t source, int c0, int c1) {
  asm volatile(PTX_TENSOR_REDUCE("2d", "{%2, %3}")::"l"(map), "r"(source), "r"(c0), "r"(c1) : "memory");
}
WRAPPER void tma_reduce_add(const TensorMap* map, uint32_t source, int c0, int c1, int c2) {
  asm volatile(PTX_TENSOR_REDUCE("3d", "{%2, %3, %4}")::"l"(map), "r"(source), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
WRAPPER void tma_reduce_add(const TensorMap* map, uint32_t source, int c0, int c1, int c2, int c3) {
  asm volatile(PTX_TENSOR_REDUCE("4d", "{%2, %3, %4, %5}")::"l"(map), "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}
WRAPPER void tma_reduce_add(const TensorMap* map, uint32_t source, int c0, int c1, int c2, int c3, int c4) {
  asm volatile(PTX_TENSOR_REDUCE("5d", "{%2, %3, %4, %5, %6}")::"l"(map), "r"(source), "r"(c0), "r"(c1), "r"(c2),
               "r"(c3), "r"(c4)
               : "memory");
}
#undef PTX_TENSOR_REDUCE

}  // namespace ptx
