// Operands of mma.m16n8k16 out of tiles of cached keys and values: as they are where the cache has q's type, widened on
// the way where it holds 8-bit floats.
//
// ldmatrix moves 16-bit units, of 8-bit floats two at a time. What a lane gets of one chunk of 16 elements:
//
//   K, not transposed    elements 4t .. 4t + 3 of row g       wanted: columns 2t, 2t + 1 (b0) and 2t + 8, 2t + 9 (b1)
//      The sum over columns may be taken in any order, so elements 4t, 4t + 1 are b0 and the other two b1. Q's columns
//      are stored in that order: see `shuffled`.
//   V, transposed        elements 2g, 2g + 1 of rows 2t, 2t + 1     wanted: column g of rows 2t, 2t + 1
//      The even elements are one block of 8 columns, the odd ones another: block c, column g is element
//      16 (c / 2) + 2g + c % 2. A lane's columns of O then are 4t .. 4t + 3 of 16.
#pragma once

#include "decode_params.cuh"
#include "mma_fragments.cuh"
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
// bias of the exponent, which FACTOR makes up for. ADD carries what is no number into the sign's place; from there
// REST shifts it to what is missing in an exponent of all ones.
template <int SHIFT_, uint32_t FACTOR_, uint32_t ADD_, int REST_>
struct Widening {
  static constexpr int SHIFT = SHIFT_, REST = REST_;
  static constexpr uint32_t FACTOR = FACTOR_, ADD = ADD_;
};
template <class Narrow, class Wide>
struct WideningOf;
template <>
struct WideningOf<e4m3_t, half_t> : Widening<1, 0x5c005c00u, 0x01000100u, 5> {};  // 2^8
template <>
struct WideningOf<e4m3_t, bfloat16_t> : Widening<4, 0x7b807b80u, 0x01000100u, 8> {};  // 2^120
template <>
struct WideningOf<e5m2_t, bfloat16_t> : Widening<3, 0x77807780u, 0x04000400u, 8> {};  // 2^112
template <>
struct WideningOf<e5m2_t, half_t> : Widening<0, 0, 0, 0> {};  // it is the upper byte of a half

// Two 8-bit floats, in the upper bytes of the halves of a word whose lower bytes are 0, as two of Wide.
template <class Narrow, class Wide>
DEVICE uint32_t widen(uint32_t word) {
  using How = WideningOf<Narrow, Wide>;
  if constexpr (How::SHIFT == 0) {
    return word;
  } else {
    const uint32_t magnitude = word & 0x7f007f00u, sign = word & 0x80008000u;
    const uint32_t bits = magnitude >> How::SHIFT | sign, special = (magnitude + How::ADD) & 0x80008000u;
    const uint32_t value = FormatOf<Wide>::VALUE == ptx::Element::f16 ? ptx::multiply_halves(bits, How::FACTOR)
                                                                      : ptx::multiply_bfloat16s(bits, How::FACTOR);
    return value | (special - (special >> How::REST));
  }
}

// Two bytes of a word, widened: neighbours, or those at the same place of each half.
template <int FIRST>
DEVICE uint32_t widen_neighbours(uint32_t word) {
  return widen<KV_ELEMENT, ELEMENT>(__byte_perm(word, 0, FIRST == 0 ? 0x1404 : 0x3424));
}
template <int FIRST>
DEVICE uint32_t widen_alternate(uint32_t word) {
  return widen<KV_ELEMENT, ELEMENT>(FIRST == 0 ? (word & 0x00ff00ffu) << 8 : word & 0xff00ff00u);
}

// Sixteen elements of a row of Q in the order in which K's fragments come.
DEVICE void shuffled(uint32_t (&low)[4], uint32_t (&high)[4]) {
  const uint32_t pairs[8] = {low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]};
#pragma unroll
  for (int t = 0; t < 4; t++) low[t] = pairs[2 * t], high[t] = pairs[2 * t + 1];
}

// The element of a row of O that a lane's d[i] and d[i + 2] of column block `block` are.
DEVICE int column_of(int block, int i) {
  const int t = lane_id() % 4;
  return NARROW ? 16 * (block / 2) + 4 * t + 2 * i + block % 2 : 8 * block + 2 * t + i;
}

// s += q k over 16 columns a step; k's rows are 16 keys from row 16 * pair of the lane's on. 8-bit keys take two steps
// at a time.
constexpr int KEY_STEPS = NARROW ? 2 : 1;

template <class KTile, int BLOCKS>
DEVICE void multiply_key_pair(float (&s)[BLOCKS][4], const uint32_t (&q)[KEY_STEPS][4], const LaneAddress& k, int step,
                              int pair) {
  uint32_t keys[4];
  ptx::ldmatrix_x4(keys, k.at<KTile>(16 * pair, NARROW ? step : 2 * step));
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float(&d)[4] = s[2 * pair + i];
    if constexpr (NARROW) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint32_t word = keys[2 * i + half];
        Products::multiply(d, q[half * (KEY_STEPS - 1)], widen_neighbours<0>(word), widen_neighbours<1>(word));
      }
    } else {
      Products::multiply(d, q[0], keys[2 * i], keys[2 * i + 1]);
    }
  }
}

// o += p v over 16 keys and 16 columns; p: the weights of these keys.
template <class VTile, int BLOCKS>
DEVICE void multiply_value_pair(float (&o)[BLOCKS][4], const uint32_t (&p)[4], const LaneAddress& v, int step,
                                int pair) {
  uint32_t values[4];
  if constexpr (NARROW) {
    // One chunk is 16 columns; two chunks come at once.
    Products::values<VTile>(values, v, step, pair, 2);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      if (4 * pair + 2 * i >= BLOCKS) break;
      const uint32_t low = values[2 * i], high = values[2 * i + 1];
      Products::multiply(o[4 * pair + 2 * i], p, widen_alternate<0>(low), widen_alternate<0>(high));
      Products::multiply(o[4 * pair + 2 * i + 1], p, widen_alternate<1>(low), widen_alternate<1>(high));
    }
  } else {
    const bool two = 2 * pair + 1 < BLOCKS;
    Products::values<VTile>(values, v, step, pair, two ? 2 : 1);
    Products::multiply(o[2 * pair], p, values[0], values[1]);
    if (two) Products::multiply(o[2 * pair + 1], p, values[2], values[3]);
  }
}
