// The products of a warp that forward, decode and backward share. A and B are tiles in shared memory.
//
//   multiply_rows      d += A B^T, summed over columns      S = Q K^T;   in backward S^T = K Q^T and dP^T = V dO^T
//   multiply_pair      d += a B, for 16 columns of B        a step of the next, and of backward's dV, dK and dQ
//   multiply_weights   o += p B, summed over rows           O += P V, with the weights p in registers
//
// Accumulators are drawn in mma/fragments.cuh. ROWS counts blocks of 16 rows.
#pragma once

#include "mma/fragments.cuh"

// The lanes' addresses are lane_of_a's and lane_of_b's. UNROLL: steps at a time. If the loop is unrolled whole, ptxas
// loads so many fragments ahead that it spills.
template <class A, class B, int UNROLL, int ROWS, int BLOCKS>
DEVICE void multiply_rows(float (&d)[ROWS][BLOCKS][4], const LaneAddress& a_lane, const LaneAddress& b_lane) {
#pragma unroll UNROLL
  for (int step = 0; step < A::CHUNKS / 2; step++) {
    uint32_t a[ROWS][4];
#pragma unroll
    for (int r = 0; r < ROWS; r++) ptx::ldmatrix_x4(a[r], a_lane.at<A>(16 * r, 2 * step));
#pragma unroll
    for (int pair = 0; pair < BLOCKS / 2; pair++) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, b_lane.at<B>(16 * pair, 2 * step));
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        Products::multiply(d[r][2 * pair], a[r], b[0], b[1]);
        Products::multiply(d[r][2 * pair + 1], a[r], b[2], b[3]);
      }
    }
  }
}

// The two blocks of 8 columns that begin `offset` pairs after the lane's, or one of them, or none.
template <class Products, class Tile, int ROWS>
DEVICE void multiply_pair(float (&low)[ROWS][4], float (&high)[ROWS][4], const uint32_t (&a)[ROWS][4],
                          const LaneAddress& b, int step, int offset, int blocks) {
  if (blocks <= 0) return;
  uint32_t values[4];
  Products::template values<Tile>(values, b, step, offset, blocks > 1 ? 2 : 1);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    Products::multiply(low[r], a[r], values[0], values[1]);
    if (blocks > 1) Products::multiply(high[r], a[r], values[2], values[3]);
  }
}

// All columns of B. The lane is that of `Products::lane_of_values`.
template <class Products, class B, int ROWS, int KEY_BLOCKS, int COLUMN_BLOCKS>
DEVICE void multiply_weights(float (&o)[COLUMN_BLOCKS][ROWS][4], const float (&p)[ROWS][KEY_BLOCKS][4],
                             const LaneAddress& b_lane) {
#pragma unroll
  for (int step = 0; step < KEY_BLOCKS * 8 / Products::KEYS; step++) {
    uint32_t a[ROWS][4];
#pragma unroll
    for (int r = 0; r < ROWS; r++) Products::weights(a[r], p[r], step);
#pragma unroll
    for (int pair = 0; pair < (COLUMN_BLOCKS + 1) / 2; pair++) {
      const int second = 2 * pair + 1, blocks = second < COLUMN_BLOCKS ? 2 : 1;
      multiply_pair<Products, B>(o[2 * pair], o[blocks == 2 ? second : 2 * pair], a, b_lane, step, pair, blocks);
    }
  }
}
