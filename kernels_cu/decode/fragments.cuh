// Operands of mma.m16n8k16 from tiles of cached keys and values: unchanged if the cache has q's type, widened on the
// way if it holds 8-bit floats.
//
// ldmatrix moves 16-bit units, of 8-bit floats two at a time. What a lane gets of one chunk of 16 elements:
//
//   K, not transposed    elements 4t .. 4t + 3 of row g       wanted: columns 2t, 2t + 1 (b0) and 2t + 8, 2t + 9 (b1)
//      The sum over columns may be taken in any order, so the even elements are b0 and the odd ones b1. Q's columns are
//      stored in that order: see `shuffled`.
//   V, transposed        elements 2g, 2g + 1 of rows 2t, 2t + 1     wanted: column g of rows 2t, 2t + 1
//      The even elements are one block of 8 columns, the odd ones another: block c, column g is element
//      16 (c / 2) + 2g + c % 2. A lane's columns of O then are 4t .. 4t + 3 of 16.
#pragma once

#include "decode/params.cuh"
#include "decode/widen.cuh"
#include "mma/products.cuh"

// Puts sixteen elements of a row of Q in the order of K's fragments.
DEVICE void shuffled(uint32_t (&low)[4], uint32_t (&high)[4]) {
  const uint32_t pairs[8] = {low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]};
#pragma unroll
  for (int t = 0; t < 4; t++) {
    low[t] = __byte_perm(pairs[2 * t], pairs[2 * t + 1], 0x5410);
    high[t] = __byte_perm(pairs[2 * t], pairs[2 * t + 1], 0x7632);
  }
}

// The same for a row of 8-bit floats, the sixteen bytes of `low`: widening separates even and odd elements.
DEVICE void widen_query(uint32_t (&low)[4], uint32_t (&high)[4]) {
  uint32_t wide[4][2];
  widen(wide, low);
#pragma unroll
  for (int t = 0; t < 4; t++) low[t] = wide[t][0], high[t] = wide[t][1];
}

// The element of a row of O that a lane's d[i] and d[i + 2] of column block `block` are.
DEVICE int column_of(int block, int i) {
  const int t = lane_id() % 4;
  return NARROW ? 16 * (block / 2) + 4 * t + 2 * i + block % 2 : 8 * block + 2 * t + i;
}

// Steps of 16 columns that a product of keys takes at a time: a chunk of 8-bit keys holds two.
constexpr int KEY_STEPS = NARROW ? 2 : 1;

// S = Q K^T of 16 rows over 8-bit keys: mma/products.cuh's multiply_rows, with keys that are widened on the way.
template <class QTile, class KTile, int BLOCKS>
DEVICE void multiply_narrow_keys(float (&s)[1][BLOCKS][4], const LaneAddress& q, const LaneAddress& k) {
#pragma unroll 2
  for (int step = 0; step < QTile::CHUNKS / 2; step += KEY_STEPS) {
    uint32_t a[KEY_STEPS][4];
#pragma unroll
    for (int i = 0; i < KEY_STEPS; i++) ptx::ldmatrix_x4(a[i], q.at<QTile>(0, 2 * (step + i)));
#pragma unroll
    for (int pair = 0; pair < BLOCKS / 2; pair++) {
      uint32_t keys[4], wide[4][2];
      ptx::ldmatrix_x4(keys, k.at<KTile>(16 * pair, step));
      widen(wide, keys);
#pragma unroll
      for (int w = 0; w < 4; w++) {
        Products::multiply(s[0][2 * pair + w / 2], a[w % 2 * (KEY_STEPS - 1)], wide[w][0], wide[w][1]);
      }
    }
  }
}

// O += P V over 8-bit values: mma/products.cuh's multiply_weights. One chunk is 16 columns; two chunks come at once.
template <class VTile, int KEY_BLOCKS, int BLOCKS>
DEVICE void multiply_narrow_values(float (&o)[BLOCKS][1][4], const float (&p)[1][KEY_BLOCKS][4], const LaneAddress& v) {
#pragma unroll
  for (int step = 0; step < KEY_BLOCKS / 2; step++) {
    uint32_t a[4];
    Products::weights(a, p[0], step);
#pragma unroll
    for (int pair = 0; pair < (BLOCKS + 3) / 4; pair++) {
      uint32_t values[4], wide[4][2];
      Products::values<VTile>(values, v, step, pair, 2);
      widen(wide, values);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (4 * pair + i >= BLOCKS) break;
        Products::multiply(o[4 * pair + i][0], a, wide[i / 2 * 2][i % 2], wide[i / 2 * 2 + 1][i % 2]);
      }
    }
  }
}
