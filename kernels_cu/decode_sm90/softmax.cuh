// Scores of a tile as wgmma leaves them, and their softmax. s[4j + i] is of row i / 2 of the lane's two, and of key
// 8j + 2 (lane % 4) + i % 2 of the tile: ptx/wgmma.cuh.
#pragma once

#include "decode/rows.cuh"
#include "forward_sm90/format.cuh"
#include "decode_sm90/layout.cuh"

using Scores = float[BLOCK_N / 2];
using Weights = uint32_t[BLOCK_N / STEP][4];
using Output = float[DIM_V / 2];

// Turns products into scores, unless only the scale lies between them. first_key: of the tile.
DEVICE void score(Scores& s, const Rows& rows, int first_key) {
#pragma unroll
  for (int i = 0; i < BLOCK_N / 2 && !SCALE_ONLY; i++) {
    const int half = half_of_register(i), key = first_key + lane_column() + column_of_register(i);
    s[i] = rows.score[half](s[i], rows.row[half], key);
  }
}

// Sets scores whose key the row does not see to -inf.
DEVICE void apply_mask(Scores& s, const Rows& rows, int first_key) {
  const int origin = first_key + lane_column();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const SeenColumns seen = rows.mask.columns(rows.row[half], origin);
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; i++) {
      const int column = column_at(i), fresh = origin + column - rows.mask.diagonal;
      bool visible = seen.has(column);
      if constexpr (TREE) visible = visible && (fresh < 0 || (rows.tree[half] >> fresh & 1) != 0);
      if (!visible) s[register_at(half, i)] = -INFINITY;
    }
  }
}

// Online softmax: scores to weights. Earlier sums must be multiplied by `correction`.
DEVICE void softmax_tile(Scores& s, SoftmaxRow (&softmax)[2], float (&correction)[2],
                         const Exponents& exponents) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float top[2] = {s[2 * half], s[2 * half + 1]}, sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 2; i < BLOCK_N / 4; i++) top[i % 2] = max_of(top[i % 2], s[register_at(half, i)]);
    float factor;
    const float base = softmax[half].raise(max_of(top[0], top[1]), exponents, factor, correction[half]);
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; i++) {
      float& x = s[register_at(half, i)];
      x = ptx::ex2(x * factor - base);
      sum[i % 2] += x;
    }
    softmax[half].l += sum[0] + sum[1];
  }
}

DEVICE void pack(Weights& p, const Scores& s) {
#pragma unroll
  for (int i = 0; i < BLOCK_N / 4; i++) p[i / 4][i % 4] = FormatOf<ELEMENT>::pack(s[2 * i], s[2 * i + 1]);
}

// Most tiles raise no maximum, and multiplying by one changes no bits.
DEVICE void rescale(Output& o, const float (&correction)[2]) {
  if (!__any_sync(ALL_LANES, correction[0] != 1.0f || correction[1] != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < DIM_V / 2; i++) o[i] *= correction[half_of_register(i)];
}
