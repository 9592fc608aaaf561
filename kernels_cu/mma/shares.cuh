// How the warps of a block share a product's columns, and how scores pass between warps through shared memory.
//
// A tile's chunks of 16 bytes come in groups whose places are XORed (mma/tile.cuh). A lane reaches the chunks of a
// group by constant offsets only if its first one shares no bit with them. So each of PARTS warps takes the same part
// of every group, or with more warps than parts, of every STRIDE-th group:
//
//   64 columns of 16 bits, two warps       | 0 1 2 3 | 4 5 6 7 |      | = part, number = chunk
//                                            warp 0    warp 1
//   192 columns of 16 bits, two warps      | 0 1 2 3 | 4 5 6 7 || 8 9 a b | c d e f || 10 ..
//                                            warp 0    warp 1     warp 0    warp 1      ..
#pragma once

#include "mma/products.cuh"

DEVICE LaneAddress moved(const LaneAddress& lane, int chunks_in_group, int other_bytes) {
  return {lane.row + other_bytes, lane.spread ^ chunks_in_group * 16};
}

// The share of a warp in the columns of a tile, in pairs of blocks of 8 columns. WARPS_SHARING take part.
template <class Tile, int WIDTH, int WARPS_SHARING>
struct Columns {
  static constexpr int PAIR = 16 / Tile::CHUNK;  // chunks
  static constexpr int GROUP = Tile::FACTOR > PAIR ? Tile::FACTOR : PAIR;
  static constexpr int PAIRS_A_GROUP = GROUP / PAIR;
  static constexpr int PARTS = WARPS_SHARING % PAIRS_A_GROUP == 0 ? PAIRS_A_GROUP : WARPS_SHARING % 2 == 0 ? 2 : 1;
  static constexpr int STRIDE = WARPS_SHARING / PARTS;  // groups from one of the warp's to its next
  static constexpr int GROUPS = (Tile::CHUNKS + GROUP - 1) / GROUP;
  static constexpr int PAIRS_A_PART = PAIRS_A_GROUP / PARTS;
  static constexpr int PAIRS = (GROUPS + STRIDE - 1) / STRIDE * PAIRS_A_PART;
  // Whether every pair of every warp is two blocks of columns that exist.
  static constexpr bool WHOLE = GROUPS % STRIDE == 0 && WIDTH % 16 == 0 && GROUPS * GROUP * Tile::CHUNK == WIDTH;
  static_assert(PARTS * PAIRS_A_PART == PAIRS_A_GROUP && PARTS * STRIDE == WARPS_SHARING, "parts are equal");

  int warp;

  // A lane's address, moved to the warp's first chunk.
  __device__ __forceinline__ LaneAddress lane(const LaneAddress& tile_lane) const {
    return moved(tile_lane, warp % PARTS * PAIRS_A_PART * PAIR, warp / PARTS * GROUP * 16);
  }
  // The same address some pairs further on: a multiple or a divisor of a part's.
  static __device__ __forceinline__ LaneAddress advanced(const LaneAddress& lane, int pair) {
    return moved(lane, pair % PAIRS_A_PART * PAIR, pair / PAIRS_A_PART * STRIDE * GROUP * 16);
  }
  // Pairs from the first one: what `Products::values` counts in.
  static __device__ __forceinline__ constexpr int offset(int pair) {
    return pair / PAIRS_A_PART * STRIDE * PAIRS_A_GROUP + pair % PAIRS_A_PART;
  }
  __device__ __forceinline__ int column(int pair) const {
    return 16 * (warp / PARTS * PAIRS_A_GROUP + warp % PARTS * PAIRS_A_PART + offset(pair));
  }
  // How many of the pair's two blocks exist: the same for all lanes of a warp.
  __device__ __forceinline__ int blocks(int pair) const {
    return WHOLE ? 2 : (WIDTH - column(pair)) / 8;
  }
};

// Scores of 16 keys (rows g and g + 8) and queries 2t, 2t + 1 of every block of 8, as operands in a tile [key][query].
// The lane is that of row g and of the warp's first query.
template <class Tile>
DEVICE LaneAddress lane_of_scores(const Tile& tile, int first_key, int first_query) {
  const int pair = sizeof(ELEMENT) == 2 ? 0 : lane_id() % 4 / 2;
  return tile.lane(first_key + lane_id() / 4, first_query / Tile::CHUNK + pair);
}

template <class Products, class Tile, int BLOCKS>
DEVICE void store_scores(const LaneAddress& lane, const float (&s)[BLOCKS][4], int first_key) {
#pragma unroll
  for (int block = 0; block < BLOCKS; block++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float low = s[block][2 * half], high = s[block][2 * half + 1];
      if constexpr (sizeof(ELEMENT) == 2) {
        const uint32_t at = lane.at<Tile>(first_key + 8 * half, block) + lane_id() % 4 * 4;
        ptx::store_shared(at, Products::pack(low, high));
      } else {
        const uint32_t at = lane.at<Tile>(first_key + 8 * half, 2 * block) + lane_id() % 2 * 8;
        const uint32_t words[2] = {Products::round(low), Products::round(high)};
        ptx::store_shared_v2(at, words);
      }
    }
  }
}

// The A operand of a step over queries: 16 keys from such a tile. The lane is lane_of_a's for 16-bit elements, and
// lane_of_scores' for floats, whose steps take queries 2t and 2t + 1 in the place of t and t + 4.
template <class Tile>
DEVICE void load_scores(uint32_t (&a)[4], const LaneAddress& lane, int first_key, int step) {
  if constexpr (sizeof(ELEMENT) == 2) {
    ptx::ldmatrix_x4(a, lane.at<Tile>(first_key, 2 * step));
  } else {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t words[2];
      ptx::load_shared_v2(words, lane.at<Tile>(first_key + 8 * half, 2 * step) + lane_id() % 2 * 8);
      a[half] = words[0];
      a[2 + half] = words[1];
    }
  }
}

// The A operand of a step over keys: 16 queries, so many chunks on, from the same tile transposed. Of floats it is two B
// operands, without chunks. The lane is that of `lane_of_scores_transposed`, moved to the queries.
template <class Products, class Tile>
DEVICE LaneAddress lane_of_scores_transposed(const Tile& tile) {
  return sizeof(ELEMENT) == 2 ? lane_of_b(tile) : Products::lane_of_values(tile);
}
template <class Products, class Tile>
DEVICE void load_scores_transposed(uint32_t (&a)[4], const LaneAddress& lane, int step, int chunks) {
  if constexpr (sizeof(ELEMENT) == 2) {
    ptx::ldmatrix_x4_trans(a, lane.at<Tile>(step * Products::KEYS, chunks));
  } else {
    uint32_t b[4];
    Products::template values<Tile>(b, lane, step, 0, 2);
    a[0] = b[0];
    a[1] = b[2];
    a[2] = b[1];
    a[3] = b[3];
  }
}
