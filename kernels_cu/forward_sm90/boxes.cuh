// Tiles in shared memory as the kernels of sm_90a have them, and the rings of stages that they pass through.
//
// Operands lie in boxes, as TMA writes them and wgmma reads them: a box is a line of 128 bytes (64 where rows are no
// multiple of 128) of each of the tile's rows, and 16-byte units are swizzled within 8 lines. Drawn for 16 bits; a line
// holds twice as many elements of 8, and a tile of their V has a row for each of its columns.
//
//     a tile of R rows and 128 columns        box 0: columns 0 .. 63        box 1: columns 64 .. 127
//                                             row 0   | 128 bytes |         row 0   | 128 bytes |
//                                             ...     |           |         ...     |           |
//                                             row R-1 |           |         row R-1 |           |
#pragma once

#include "common/params.cuh"
#include "mma/accumulator.cuh"
#include "ptx.cuh"

constexpr int WARPGROUP = 128;  // threads

// Products of 8-bit elements need both operands contiguous along the summed dimension, so V is transposed
// (forward_sm90/transposer.cuh).
constexpr bool FP8 = sizeof(ELEMENT) == 1;
constexpr int STEP = 32 / sizeof(ELEMENT);  // what a product sums at a time: 32 bytes of its operands

// Head dims are compiled for the next of these (8-bit rows of 96 do not fill whole boxes); TMA fills the columns
// between with zeros.
constexpr int padded_dim(int dim) {
  return dim <= 64 ? 64 : dim <= 96 && !FP8 ? 96 : dim <= 128 ? 128 : dim <= 192 ? 192 : 256;
}

// A tile in boxes. SHARE: columns that a product takes, which are whole boxes.
template <int TILE_ROWS, int COLUMNS, class Element = ELEMENT, int SHARE = COLUMNS>
struct Boxes {
  static constexpr int ITEM = sizeof(Element), UNIT = 16 / ITEM;                      // bytes; columns
  static constexpr int WIDTH = (SHARE * ITEM % 128 == 0 ? 128 : 64) / ITEM;  // columns of a box
  static constexpr int COUNT = COLUMNS / WIDTH;
  static constexpr uint32_t LINE = ITEM * WIDTH, BOX_BYTES = TILE_ROWS * LINE, BYTES = COUNT * BOX_BYTES;
  static constexpr uint32_t EIGHT_LINES = 8 * LINE;
  static constexpr ptx::Swizzle SWIZZLE = LINE == 128 ? ptx::Swizzle::b128 : ptx::Swizzle::b64;
  static_assert(COLUMNS % WIDTH == 0 && SHARE % WIDTH == 0, "columns fill whole boxes");
  static_assert(BOX_BYTES % EIGHT_LINES == 0, "boxes start where the swizzle starts");

  // wgmma descriptors: of the rows (columns are multiplied and summed), and of the columns (rows are).
  static __device__ __forceinline__ uint64_t rows(uint32_t base) {
    return ptx::matrix_descriptor<SWIZZLE, 16, EIGHT_LINES>(base);
  }
  static __device__ __forceinline__ uint64_t columns(uint32_t base) {
    return ptx::matrix_descriptor<SWIZZLE, BOX_BYTES, EIGHT_LINES>(base);
  }
  // What the n-th step of columns, or of rows, adds to a descriptor.
  static __device__ __forceinline__ constexpr uint32_t column_step(int n) {
    return (n * STEP / WIDTH * BOX_BYTES + n * STEP % WIDTH * ITEM) / 16;
  }
  static __device__ __forceinline__ constexpr uint32_t row_step(int n) { return n * STEP * LINE / 16; }

  // The 16 bytes of a row that begin with column UNIT * unit.
  static __device__ __forceinline__ uint32_t place(uint32_t base, int row, int unit) {
    constexpr int UNITS = WIDTH / UNIT;
    const int spread = row % 8 / (8 / UNITS);
    return base + unit / UNITS * BOX_BYTES + row * LINE + (unit % UNITS ^ spread) * 16;
  }
  // `units` further in the row than a place in the first box, whose unit has none of their bits.
  static __device__ __forceinline__ uint32_t along(uint32_t place, int units) {
    constexpr int UNITS = WIDTH / UNIT;
    return (place ^ units % UNITS * 16) + units / UNITS * BOX_BYTES;
  }
};

// Where a role is in a ring of stages. Consumers start with parity 0 and wait for full stages. The producer starts with
// parity 1 and waits for empty ones, which all are at first (ptx/mbarrier.cuh).
template <int LENGTH>
struct Ring {
  int stage;
  uint32_t parity;

  __device__ __forceinline__ void advance() {
    if (++stage == LENGTH) {
      stage = 0;
      parity ^= 1;
    }
  }
};
