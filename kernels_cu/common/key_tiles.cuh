// The tiles of keys that a tile of rows is multiplied with.
#pragma once

#include "common/mask.cuh"
#include "common/score.cuh"

#if BLOCK_MASK
static_assert(BLOCK_MASK_ROWS % BLOCK_M == 0 && BLOCK_MASK_KEYS % BLOCK_N == 0, "blocks of a mask are whole tiles");
using Tiles = ListedTiles<BLOCK_MASK_KEYS / BLOCK_N>;

DEVICE Tiles key_tiles(const LaunchParams& params, const Mask&, int sequence, int head, int row_begin, int) {
  // Lists end with the longest sequence that the caller said, but lengths on the device may be longer.
  if (VARLEN && row_begin >= params.seqlen_q) return {};
  return {bind_block_list(params.score_params(), sequence, head, row_begin / BLOCK_MASK_ROWS)};
}
#else
using Tiles = KeyTiles;

DEVICE Tiles key_tiles(const LaunchParams&, const Mask& mask, int, int, int row_begin, int row_end) {
  return mask.tiles<BLOCK_N>(row_begin, row_end);
}
#endif
