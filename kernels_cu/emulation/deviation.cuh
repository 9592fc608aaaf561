// The errors of functions that the hardware approximates: approximation.cuh.
#pragma once

#include "emulation/approximation.cuh"

namespace emulation {

// In [-1, 1]; any two operands, functions or seeds give unrelated numbers.
inline double deviation(float operand, uint32_t function) {
  uint32_t bits;
  memcpy(&bits, &operand, 4);
  Random random;
  random.seed(self().block->request->seed, uint64_t(function) << 32 | bits);
  return static_cast<double>(random.next()) * 0x1p-47 - 1.0;
}

inline double ulp_of(double value) {
  int exponent;
  frexp(value, &exponent);
  return ldexp(1.0, exponent - 24);
}

float drawn_within(double exact, double distance, float operand, uint32_t function) {
  const float nearest = static_cast<float>(exact);
  if (!(fabsf(nearest) < INFINITY)) return nearest;
  const float drawn = static_cast<float>(exact + deviation(operand, function) * (distance - 0.5 * ulp_of(exact)));
  return fabs(drawn - exact) <= distance ? drawn : nearest;  // floats above a power of two are farther apart
}

float drawn_within_ulps(double exact, int ulps, float operand, uint32_t function) {
  const float nearest = static_cast<float>(exact);
  if (nearest == 0.0f || !(fabsf(nearest) < INFINITY)) return nearest;
  const int steps = static_cast<int>(lrint(deviation(operand, function) * (ulps + 0.499)));
  uint32_t magnitude;
  memcpy(&magnitude, &nearest, 4);
  const uint32_t sign = magnitude & 0x80000000u;
  magnitude &= 0x7FFFFFFFu;
  const int64_t moved = int64_t(magnitude) + steps;
  magnitude = moved < 0 ? 0 : moved > 0x7F7FFFFF ? 0x7F7FFFFF : uint32_t(moved);
  const uint32_t bits = sign | magnitude;
  float drawn;
  memcpy(&drawn, &bits, 4);
  return drawn;
}

}  // namespace emulation
