// The tiles of keys that a block of forward_mma or forward_simple multiplies.
#pragma once

#include "common/block_tile.cuh"
#include "common/score.cuh"

#if BLOCK_MASK
static_assert(BLOCK_MASK_ROWS % BLOCK_M == 0 && BLOCK_MASK_KEYS % BLOCK_N == 0, "blocks of a mask are whole tiles");
using Tiles = ListedTiles<BLOCK_MASK_KEYS / BLOCK_N>;

DEVICE Tiles key_tiles(const LaunchParams& params, const BlockTile& at, const Mask&, int) {
  return {bind_block_list(params.score_params(), at.sequence, at.head, at.row_begin / BLOCK_MASK_ROWS)};
}
#else
using Tiles = KeyTiles;

DEVICE Tiles key_tiles(const LaunchParams&, const BlockTile& at, const Mask& mask, int row_end) {
  return mask.tiles<BLOCK_N>(at.row_begin, row_end);
}
#endif
