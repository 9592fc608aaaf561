// The online softmax of rows that a half-warp owns (Dao, arXiv 2307.08691, algorithm 1), and the sum of the values that it
// weights: a lane has every sixteenth key of a tile, and every sixteenth column of the output.
#pragma once

#include "common/half_warps.cuh"

constexpr int COLUMNS = (HEAD_DIM_V + LANES - 1) / LANES;

struct WeightedRows {  // the state of a half-warp's rows in one of its lanes
  Real m[ROWS];           // running maximum of the scores, the same in all lanes
  Real l[ROWS];           // running sum of exp(score - m) over this lane's keys
  Real o[ROWS][COLUMNS];  // running sum of exp(score - m) * v for this lane's columns

  // Scales what was summed before to the new maximum, to which the following scores are relative.
  __device__ __forceinline__ Real raise_maximum(int r, Real maximum) {
    maximum = max_of(m[r], max_over_lanes(maximum));
    const Real base = maximum == -INFINITY ? Real(0) : maximum;
    const Real correction = exp_of(m[r] - base);
    m[r] = maximum;
    l[r] *= correction;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) o[r][c] *= correction;
    return base;
  }
};

DEVICE void add_values(WeightedRows& rows, const Real* p_rows, const Real* v_tile, int lane, int keys) {
  for (int key = 0; key < keys; key++) {
    Real v[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const int column = c * LANES + lane;
      v[c] = column < HEAD_DIM_V ? v_tile[key * PITCH + column] : Real(0);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const Real p = p_rows[r * BLOCK_N + key];
      if (p == HIDDEN) continue;
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) rows.o[r][c] += p * v[c];
    }
  }
}
