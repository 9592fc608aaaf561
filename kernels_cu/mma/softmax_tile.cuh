// The softmax of a tile of scores in accumulators, and the rescaling of the output. mma/softmax.cuh has the rows.
#pragma once

#include "mma/fragments.cuh"
#include "mma/softmax.cuh"

// Products to weights for one half (rows g or g + 8) of 16 rows. score(x, column): what enters the softmax in place of
// product x; column: of the tile. Returns the factor that O must be multiplied by.
template <int KEY_BLOCKS, class ScoreOf>
DEVICE float softmax_tile(float (&s)[KEY_BLOCKS][4], SoftmaxRow& softmax, const Exponents& exponents, int half,
                          ScoreOf score) {
  float largest = -INFINITY, factor, correction;
#pragma unroll
  for (int block = 0; block < KEY_BLOCKS; block++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float& x = s[block][2 * half + i];
      x = score(x, 8 * block + lane_column() + i);
      largest = max_of(largest, x);
    }
  }
  const float base = softmax.raise(largest, exponents, factor, correction);
#pragma unroll
  for (int block = 0; block < KEY_BLOCKS; block++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float& x = s[block][2 * half + i];
      x = ptx::ex2(x * factor - base);
      softmax.l += x;
    }
  }
  return correction;
}

// Rescales the r-th 16 rows of O. Most tiles raise no maximum, and multiplying by one changes no bits.
template <int COLUMN_BLOCKS, int ROWS>
DEVICE void rescale(float (&o)[COLUMN_BLOCKS][ROWS][4], int r, const float (&correction)[2]) {
  if (!__any_sync(ALL_LANES, correction[0] != 1.0f || correction[1] != 1.0f)) return;
#pragma unroll
  for (int c = 0; c < COLUMN_BLOCKS; c++) {
#pragma unroll
    for (int i = 0; i < 4; i++) o[c][r][i] *= correction[i / 2];
  }
}
