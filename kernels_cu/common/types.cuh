// Element types without a toolkit header: structs that carry the bits of a format, to_real and from_real. In bits,
//
//   half_t  1 + 5 + 10      bfloat16_t  1 + 8 + 7      e4m3_t  1 + 4 + 3, no infinity      e5m2_t  1 + 5 + 2
//
// Sums are kept in Accumulator<Element>: double for double, float for everything else.
#pragma once

#include "ptx/convert.cuh"

struct half_t {
  uint16_t bits;
};
struct bfloat16_t {
  uint16_t bits;
};
struct e4m3_t {
  uint8_t bits;
};
struct e5m2_t {
  uint8_t bits;
};

template <bool FIRST, class A, class B>
struct ChoiceOf {
  using type = A;
};
template <class A, class B>
struct ChoiceOf<false, A, B> {
  using type = B;
};
template <bool FIRST, class A, class B>
using Choice = typename ChoiceOf<FIRST, A, B>::type;

template <class Element>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <class Element>
using Accumulator = typename AccumulatorOf<Element>::type;

DEVICE double to_real(double x) { return x; }
DEVICE float to_real(float x) { return x; }
DEVICE float to_real(half_t x) { return ptx::half_to_float(x.bits); }
DEVICE float to_real(bfloat16_t x) { return ptx::as_float(uint32_t(x.bits) << 16); }

// e5m2 is the upper byte of a half.
DEVICE float to_real(e5m2_t x) { return ptx::half_to_float(uint16_t(x.bits << 8)); }

// Shifted into a half, e4m3's bits read 2^8 too small: the exponent biases are 15 and 7.
DEVICE float to_real(e4m3_t x) {
  const uint32_t magnitude = x.bits & 0x7f;
  if (magnitude == 0x7f) return ptx::as_float(0x7fc00000u);
  return 256.0f * ptx::half_to_float(uint16_t((x.bits & 0x80) << 8 | magnitude << 7));
}

// A float rounded to nearest even at BITS significant bits, with float's range of exponents: 8 bits are bf16's, 11 are
// f16's and tf32's, 24 change nothing. Infinities and NaN pass through; what rounds past the largest is an infinity.
template <int BITS>
DEVICE float round_significand(float x) {
  static_assert(BITS >= 2 && BITS <= 24, "a float has 24 significant bits");
  if constexpr (BITS == 24) return x;
  constexpr uint32_t dropped = (1u << (24 - BITS)) - 1;
  const uint32_t bits = ptx::as_bits(x);
  if ((bits & 0x7f800000u) == 0x7f800000u) return x;
  const uint32_t even = bits >> (24 - BITS) & 1;
  return ptx::as_float((bits + (dropped >> 1) + even) & ~dropped);
}
template <int BITS>
DEVICE double round_significand(double x) {
  static_assert(BITS == 24, "reduced precision is for float inputs");
  return x;
}

template <class Element>
struct Rounded {};  // an overload tag: from_real(Rounded<half_t>(), x)

DEVICE double from_real(Rounded<double>, double x) { return x; }
DEVICE float from_real(Rounded<float>, float x) { return x; }
DEVICE half_t from_real(Rounded<half_t>, float x) { return {ptx::float_to_half(x)}; }

DEVICE bfloat16_t from_real(Rounded<bfloat16_t>, float x) {
  if (x != x) return {0x7fff};
  return {uint16_t(ptx::as_bits(round_significand<8>(x)) >> 16)};
}

// fp8, saturating at `largest` as the hardware does. Subnormals are multiples of 2^(1 - EXPONENT_BIAS - FRACTION).
template <int FRACTION, int EXPONENT_BIAS>
DEVICE uint8_t round_to_fp8(float x, float largest, uint8_t not_a_number) {
  const uint8_t sign = uint8_t(ptx::as_bits(x) >> 24 & 0x80);
  if (x != x) return sign | not_a_number;
  float magnitude = ptx::as_float(ptx::as_bits(x) & 0x7fffffffu);
  if (magnitude > largest) magnitude = largest;
  const float smallest_normal = ptx::as_float(uint32_t(128 - EXPONENT_BIAS) << 23);
  if (magnitude < smallest_normal) {
    // Adding 2^23 units of the last place rounds to a multiple of it; the low bits of the sum are the code.
    const float anchor = ptx::as_float(uint32_t(128 - EXPONENT_BIAS - FRACTION + 23) << 23);
    return sign | uint8_t(ptx::as_bits(magnitude + anchor) & 0xff);
  }
  const uint32_t bits = ptx::as_bits(round_significand<FRACTION + 1>(magnitude));
  return sign | uint8_t((bits >> (23 - FRACTION)) - (uint32_t(127 - EXPONENT_BIAS) << FRACTION));
}
DEVICE e4m3_t from_real(Rounded<e4m3_t>, float x) { return {round_to_fp8<3, 7>(x, 448.0f, 0x7f)}; }
DEVICE e5m2_t from_real(Rounded<e5m2_t>, float x) { return {round_to_fp8<2, 15>(x, 57344.0f, 0x7e)}; }
