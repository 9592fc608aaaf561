// The blocks that a block mask lists: of keys for a block of rows, or of rows for a block of keys. Other blocks are
// neither loaded nor multiplied.
//
//   tile n   0 1 2 3 | 4 5 6 7 | 8 ..     where blocks have four tiles
//   block    partial[0] partial[1] full[0] ..
//
// If a length is not a multiple of a block, the last one has tiles past the end, which kernels skip.
#pragma once

#include "common/types.cuh"

struct BlockIndices {
  const int32_t* indices;
  int64_t step;
  int count;
};

struct BlockList {
  BlockIndices partial, full;

  __device__ __forceinline__ int count() const { return partial.count + full.count; }
  __device__ __forceinline__ int at(int n) const {
    return n < partial.count ? partial.indices[n * partial.step] : full.indices[(n - partial.count) * full.step];
  }
};

// The tiles of a list, BLOCK_TILES of them a block.
template <int BLOCK_TILES>
struct ListedTiles {
  BlockList list;

  __device__ __forceinline__ int count() const { return list.count() * BLOCK_TILES; }
  __device__ __forceinline__ int at(int n) const { return list.at(n / BLOCK_TILES) * BLOCK_TILES + n % BLOCK_TILES; }
  __device__ __forceinline__ bool is_full(int n) const { return n / BLOCK_TILES >= list.partial.count; }
};
