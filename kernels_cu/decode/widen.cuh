// 8-bit floats of a cache, and of q over one, widened exactly to the type in which they are multiplied.
#pragma once

#include "common/params.cuh"
#include "ptx/halves.cuh"

constexpr bool NARROW = sizeof(KV_ELEMENT) == 1;
constexpr bool NARROW_Q = sizeof(Q_ELEMENT) == 1;

template <class Element>
constexpr bool WIDE_IS_HALF = false;
template <>
constexpr bool WIDE_IS_HALF<half_t> = true;

// How an 8-bit float in the upper byte of a half is widened: shifted right it has the wide format's bits, except the
// bias of the exponent, which FACTOR makes up for. NaN and infinity also need an exponent of all ones: REST added to
// their 8-bit magnitude carries into the sign's place, and from there SPREAD shifts it.
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

template <class One, class Other>
constexpr bool SAME = false;
template <class One>
constexpr bool SAME<One, One> = true;
static_assert(SAME<Q_ELEMENT, Choice<NARROW_Q, KV_ELEMENT, ELEMENT>>, "8-bit queries have the type of keys");

// Widens the even or the odd bytes of a word. NaN and infinity come out as numbers.
template <int ODD>
DEVICE uint32_t widen_numbers(uint32_t word) {
  constexpr uint32_t MAGNITUDES = (0x7f00u >> Widen::SHIFT) * 0x10001u;
  const uint32_t magnitudes = (ODD ? word >> Widen::SHIFT : word << (8 - Widen::SHIFT)) & MAGNITUDES;
  const uint32_t bits = magnitudes | ((ODD ? word : word << 8) & 0x80008000u);
  if constexpr (Widen::SHIFT == 0) return bits;
  else if constexpr (WIDE_IS_HALF<ELEMENT>) return ptx::multiply_halves(bits, Widen::FACTOR);
  else return ptx::multiply_bfloat16s(bits, Widen::FACTOR);
}

// The exponent bits that NaN and infinity among the even or the odd bytes still lack.
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

// Two 8-bit floats, in the lower bytes of the two halves of a word.
DEVICE uint32_t widen_pair(uint32_t pair) { return widen_numbers<0>(pair) | nonfinite_exponents<0>(pair); }
