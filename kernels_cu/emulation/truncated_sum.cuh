// How Hopper's tensor cores sum products of 8-bit elements: a model of what others have measured, because NVIDIA
// publishes nothing about it.
//
// - DeepSeek-V3 (arXiv 2412.19437, sections 3.3.2 and 3.5.2), on Hopper: the 32 products of an instruction are shifted
//   right to the largest exponent, and about 14 bits of each are summed; what lies below is cut off. The registers that
//   take the sum are no more precise.
// - SageAttention2 (arXiv 2411.10958), on Ada and Hopper: an accumulator has a sign, 8 exponent bits and 13 fraction
//   bits, and what a float has below them is cut off.
// - MMA-Sim (arXiv 2511.10909), which agrees with Hopper bit for bit: all 32 products and the old value are one sum. A
//   product's exponent is the sum of its factors' exponents, which a significand of 2 or more does not raise, and an
//   element below the least normal number of its format has that number's exponent.
//
// The model: the addends of an element of d are its products and, if it accumulates, its old value. The largest of
// their exponents gives a unit, 2^-13 of that power of two. Each addend is cut off toward zero to whole units, these
// are added exactly, and the sum is cut off to 13 fraction bits. A unit here is at least 2^-126, which cuts old values
// below 2^-113 off too early if nothing else is added.
//
// This is always so for wgmma. mma.sync of 8-bit elements becomes products of f16 on sm_90; on sm_89 it keeps as few bits,
// which Arithmetic::hardware shows.
//
// Sums of products of 16-bit elements and tf32 are cut off too, farther down: MMA-Sim finds 25 fraction bits on Hopper and
// 24 on Ampere, below the largest exponent, and a sum that is cut off to a float. wgmma sums the 16 products of an
// instruction at once, mma.sync on Ampere 8 (4 of tf32). That is Arithmetic::hardware; else such sums are fp32's.
#pragma once

#include "emulation/formats.cuh"

namespace emulation {

constexpr int KEPT_FRACTION_BITS = 13;
constexpr int NO_EXPONENT = -(1 << 20);  // of a zero: its sum with another exponent is never the largest

// The exponent that `value`, an element of a format whose normal numbers start at `least`, has in a sum: as float's.
inline int exponent_of(float value, int least) {
  const uint32_t magnitude = __float_as_uint(value) & 0x7FFFFFFFu;
  return magnitude == 0 ? NO_EXPONENT : upper(int(magnitude >> 23), least);
}
inline void exponents_of(Element e, const float* values, int count, int* exponents) {
  const int least = e == Element::e4m3 ? 127 - 6 : e == Element::f16 || e == Element::e5m2 ? 127 - 14 : 1;
  for (int i = 0; i < count; i++) exponents[i] = exponent_of(values[i], least);
}

// Factors of products: elements as floats, and their exponents.
struct Factors {
  const float* value;
  const int* exponent;

  Factors from(int first) const { return {value + first, exponent + first}; }
};

// COLUMNS elements of a row of d: d += a[0 .. k) b[0 .. k)[0 .. COLUMNS), whose rows lie `pitch` apart. A sum with an
// infinity or a NaN is what fp32 makes of it.
template <int COLUMNS>
inline void add_truncated(Factors a, Factors b, int pitch, int k, float* d) {
  constexpr int LEAST = KEPT_FRACTION_BITS + 1;  // its unit is normal, too
  constexpr uint32_t DROPPED = (1u << (23 - KEPT_FRACTION_BITS)) - 1;
  float plain[COLUMNS], to_units[COLUMNS], unit[COLUMNS];
  int top[COLUMNS], sum[COLUMNS];
  for (int j = 0; j < COLUMNS; j++) plain[j] = d[j], top[j] = exponent_of(d[j], 1) + 127;
  for (int x = 0; x < k; x++)
    for (int j = 0; j < COLUMNS; j++) {
      plain[j] += a.value[x] * b.value[x * pitch + j];
      top[j] = upper(top[j], a.exponent[x] + b.exponent[x * pitch + j]);
    }
  float probe = 0.0f;
  for (int j = 0; j < COLUMNS; j++) probe += plain[j] * 0.0f;
  if (probe != 0.0f) {  // NaN: some sum is not finite
    if constexpr (COLUMNS == 1) d[0] = plain[0];
    else
      for (int j = 0; j < COLUMNS; j++) add_truncated<1>(a, b.from(j), pitch, k, d + j);
    return;
  }
  for (int j = 0; j < COLUMNS; j++) {
    const uint32_t exponent = upper(top[j] - 127, LEAST);
    unit[j] = float_of((exponent - KEPT_FRACTION_BITS) << 23);
    to_units[j] = float_of((254 + KEPT_FRACTION_BITS - exponent) << 23);
    sum[j] = int(d[j] * to_units[j]);
  }
  for (int x = 0; x < k; x++)
    for (int j = 0; j < COLUMNS; j++) sum[j] += int(a.value[x] * b.value[x * pitch + j] * to_units[j]);
  for (int j = 0; j < COLUMNS; j++) d[j] = float_of(__float_as_uint(float(sum[j]) * unit[j]) & ~DROPPED);
}

inline float toward_zero(double value) {
  const float nearest = static_cast<float>(value);
  return fabs(static_cast<double>(nearest)) > fabs(value) ? float_of(__float_as_uint(nearest) - 1) : nearest;
}

// The same for wider elements, with `fraction` bits below the largest exponent. Doubles hold each sum exactly.
template <int COLUMNS>
inline void add_cut_off(Factors a, Factors b, int pitch, int k, int fraction, float* d) {
  double sum[COLUMNS], to_units[COLUMNS], unit[COLUMNS];
  float plain[COLUMNS];
  int top[COLUMNS];
  for (int j = 0; j < COLUMNS; j++) plain[j] = d[j] * 0.0f, top[j] = exponent_of(d[j], 1) + 127;
  for (int x = 0; x < k; x++)
    for (int j = 0; j < COLUMNS; j++) {
      plain[j] += a.value[x] * 0.0f + b.value[x * pitch + j] * 0.0f;
      top[j] = upper(top[j], a.exponent[x] + b.exponent[x * pitch + j]);
    }
  for (int j = 0; j < COLUMNS; j++) {
    const uint64_t shift = static_cast<uint64_t>(upper(top[j], 0) - 254 - fraction + 1023), back = 2046 - shift;
    const uint64_t unit_bits = shift << 52, to_units_bits = back << 52;
    memcpy(&unit[j], &unit_bits, 8);
    memcpy(&to_units[j], &to_units_bits, 8);
    sum[j] = trunc(static_cast<double>(d[j]) * to_units[j]);
  }
  for (int x = 0; x < k; x++)
    for (int j = 0; j < COLUMNS; j++)
      sum[j] += trunc(static_cast<double>(a.value[x]) * static_cast<double>(b.value[x * pitch + j]) * to_units[j]);
  for (int j = 0; j < COLUMNS; j++) {
    if (plain[j] == 0.0f) {
      d[j] = toward_zero(sum[j] * unit[j]);
      continue;
    }
    for (int x = 0; x < k; x++) d[j] += a.value[x] * b.value[x * pitch + j];  // an infinity or a NaN takes part
  }
}

}  // namespace emulation
