// The packed rows of a lane: their scores and their masks.
#pragma once

#include "decode/output.cuh"

// The two rows that a lane owns, what turns their products into weights, and the keys of its warp.
struct Rows {
  Score<float> score[2];
  Mask mask;
  uint64_t tree[2];  // new keys that the row sees
  int row[2];
  Exponents exponents;
  int first_key;  // of the warp, in a tile
#if POSITIONS
  int first_new_key;
  __device__ __forceinline__ int first_new() const { return first_new_key; }
#else
  __device__ __forceinline__ int first_new() const { return mask.diagonal; }
#endif

  __device__ __forceinline__ bool visible(int half, int key) const {
    if (!mask.visible(row[half], key)) return false;
    if constexpr (TREE) {
      const int fresh = key - first_new();
      return fresh < 0 || (tree[half] >> fresh & 1) != 0;
    }
    return true;
  }
};

// first: the lane's first packed row of the tile, 8 before the other. Rows past the end are treated as the last one, so that
// they read nothing of their own. They are never stored.
DEVICE Rows rows_of(const DecodeParams& params, const Entry& entry, int kv_head, int first, int first_key = 0) {
  const Params& attention = params.attention;
  const int ratio = heads_a_group(params);
  Rows rows;
  rows.mask = entry.mask;
  rows.first_key = first_key;
#if POSITIONS
  rows.first_new_key = entry.first_new();
#endif
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int packed = at_most(entry.packed_end - 1, entry.packed_begin + first + 8 * half);
    const int head = kv_head * ratio + packed % ratio;
    rows.row[half] = packed / ratio;
    rows.score[half] = make_score<float>(attention, entry.sequence, head, kv_head, entry.mask.diagonal);
#if POSITIONS
    rows.score[half].positions = entry.mask.positions;
#endif
    rows.tree[half] = 0;
    if constexpr (TREE) {
      const int64_t row = entry.lengths.q_start + rows.row[half];
      rows.tree[half] = *element_of<const uint64_t>(params.tree_mask, params.tree_mask_strides, entry.sequence, row, 0);
    }
  }
  rows.exponents = exponents_of(attention);
  return rows;
}

// Whether each row of the entry sees each key of a tile.
DEVICE bool all_visible(const Entry& entry, int key_begin) {
  const int key_end = key_begin + BLOCK_N;
  if (TREE && key_end > entry.first_new()) return false;
  return entry.mask.all_visible(entry.row_begin, entry.row_end, key_begin, key_end);
}
