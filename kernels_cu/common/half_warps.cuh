// Tiles that half-warps multiply on CUDA cores: of BLOCK_M rows, a half-warp owns ROWS, and its 16 lanes share the
// BLOCK_N keys that these meet, lane l taking keys l, l + 16 and so on.
#pragma once

#include "common/params.cuh"
#include "ptx/math.cuh"

using Real = Accumulator<ELEMENT>;

constexpr int THREADS = WARPS * 32;
constexpr int LANES = 16;
constexpr int ROWS = BLOCK_M / (THREADS / LANES);
constexpr int KEYS = BLOCK_N / LANES;
// An odd pitch puts the same column of neighbouring rows into different banks.
constexpr int PITCH = (HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V) | 1;
static_assert(ROWS * (THREADS / LANES) == BLOCK_M, "BLOCK_M must be a multiple of the half-warps of a block");
static_assert(KEYS * LANES == BLOCK_N, "BLOCK_N must be a multiple of 16");

// Stands for a weight if a row does not see a key. Such a pair is skipped, because 0 * NaN would let a masked NaN into
// a sum.
constexpr Real HIDDEN = -1;

// Loads `count` rows of WIDTH columns into shared memory, and zeros up to ROW_LIMIT rows.
template <int ROW_LIMIT, int WIDTH, class Element>
DEVICE void load_tile(Real* tile, const Element* rows, int64_t row_stride, int count) {
  for (int n = threadIdx.x; n < ROW_LIMIT * WIDTH; n += THREADS) {
    const int row = n / WIDTH, column = n % WIDTH;
    const Real loaded = row < count ? Real(to_real(rows[row * row_stride + column])) : Real(0);
    tile[row * PITCH + column] = round_operand<COMPUTE_BITS>(loaded);
  }
}

// Over the 16 lanes that share rows.
DEVICE Real max_over_lanes(Real x) {
  for (int step = LANES / 2; step > 0; step /= 2) x = max_of(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}
DEVICE Real sum_over_lanes(Real x) {
  for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// Adds to each dot product of a row of the first tile with one of the second, over WIDTH columns. second: from the
// lane's first row on.
template <int WIDTH>
DEVICE void dot_products(Real (&dot)[ROWS][KEYS], const Real* first, const Real* second) {
#pragma unroll 4
  for (int column = 0; column < WIDTH; column++) {
    Real k[KEYS];
#pragma unroll
    for (int c = 0; c < KEYS; c++) k[c] = second[c * LANES * PITCH + column];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const Real q = first[r * PITCH + column];
#pragma unroll
      for (int c = 0; c < KEYS; c++) dot[r][c] += q * k[c];
    }
  }
}
