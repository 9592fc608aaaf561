// Operands of mma.m16n8k16 out of tiles of cached keys and values: as they are where the cache has q's type, widened on
// the way where it holds 8-bit floats.
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
#include "mma/products.cuh"
#include "ptx/halves.cuh"

template <class Element>
struct FormatOf;
template <>
struct FormatOf<half_t> {
  static constexpr ptx::Element VALUE = ptx::Element::f16;
};
template <>
struct FormatOf<bfloat16_t> {
  static constexpr ptx::Element VALUE = ptx::Element::bf16;
};
constexpr bool NARROW = sizeof(KV_ELEMENT) == 1;

// How an 8-bit float in the upper byte of a half is widened: shifted right it is the wide format's bits, but for the
// bias of the exponent, which FACTOR makes up for. What is no number needs an exponent of all ones besides: REST added
// to an 8-bit magnitude carries into the sign's place for these, and from there SPREAD shifts it.
template <int SHIFT_, uint32_t FACTOR_, uint32_t REST_, int SPREAD_>
struct Widening {
  static constexpr int SHIFT = SHIFT_, SPREAD = SPREAD_;
  static constexpr uint32_t FACTOR = FACTOR_, REST = REST_;
};
template <class Narrow, class Wide>
struct WideningOf : Widening<0, 0, 0, 0> {};  // e5m2 is the upper byte of a half
template <>
struct WideningOf<e4m3_t, half_t> : Widening<1, 0x5c005c00u, 0x01010101u, 5> {};  // 2^8
template <>
struct WideningOf<e4m3_t, bfloat16_t> : Widening<4, 0x7b807b80u, 0x01010101u, 8> {};  // 2^120
template <>
struct WideningOf<e5m2_t, bfloat16_t> : Widening<3, 0x77807780u, 0x04040404u, 8> {};  // 2^112
using Widen = WideningOf<KV_ELEMENT, ELEMENT>;

// The even or the odd bytes of a word, widened; what is no number comes out as one.
template <int ODD>
DEVICE uint32_t widen_numbers(uint32_t word) {
  constexpr uint32_t MAGNITUDES = (0x7f00u >> Widen::SHIFT) * 0x10001u;
  const uint32_t magnitudes = (ODD ? word >> Widen::SHIFT : word << (8 - Widen::SHIFT)) & MAGNITUDES;
  const uint32_t bits = magnitudes | ((ODD ? word : word << 8) & 0x80008000u);
  if constexpr (Widen::SHIFT == 0) return bits;
  else if constexpr (FormatOf<ELEMENT>::VALUE == ptx::Element::f16) return ptx::multiply_halves(bits, Widen::FACTOR);
  else return ptx::multiply_bfloat16s(bits, Widen::FACTOR);
}

// The exponents that the even or the odd bytes lack which are no number.
template <int ODD>
DEVICE uint32_t nonfinite_exponents(uint32_t word) {
  const uint32_t carried = (word & 0x7f7f7f7fu) + Widen::REST;
  const uint32_t nonfinite = (ODD ? carried : carried << 8) & 0x80008000u;
  return nonfinite - (nonfinite >> Widen::SPREAD);
}

// Four words of 8-bit floats: wide[w][0] the even and wide[w][1] the odd bytes of words[w].
DEVICE void widen(uint32_t (&wide)[4][2], const uint32_t (&words)[4]) {
  uint32_t carried = 0;
#pragma unroll
  for (int w = 0; w < 4; w++) {
    wide[w][0] = widen_numbers<0>(words[w]);
    wide[w][1] = widen_numbers<1>(words[w]);
    carried |= (words[w] & 0x7f7f7f7fu) + Widen::REST;
  }
  if (Widen::REST == 0 || (carried & 0x80808080u) == 0) return;  // nearly always
#pragma unroll
  for (int w = 0; w < 4; w++) {
    wide[w][0] |= nonfinite_exponents<0>(words[w]);
    wide[w][1] |= nonfinite_exponents<1>(words[w]);
  }
}

// Sixteen elements of a row of Q in the order in which K's fragments come.
DEVICE void shuffled(uint32_t (&low)[4], uint32_t (&high)[4]) {
  const uint32_t pairs[8] = {low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]};
#pragma unroll
  for (int t = 0; t < 4; t++) {
    low[t] = __byte_perm(pairs[2 * t], pairs[2 * t + 1], 0x5410);
    high[t] = __byte_perm(pairs[2 * t], pairs[2 * t + 1], 0x7632);
  }
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
