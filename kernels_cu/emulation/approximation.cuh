// How far a function that the hardware approximates may be from the truth. With Arithmetic::nearest it is what the host's
// mathematical library makes of it, a float next to the truth; with Arithmetic::hardware it errs by any amount that its documentation allows, chosen by the launch's
// seed, and by the same amount wherever the operand is the same.
#pragma once

#include "emulation/collective.cuh"

namespace emulation {

inline bool like_hardware() { return self().block->request->arithmetic == Arithmetic::hardware; }

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

// The float nearest to `exact`, or one up to `distance` from it. Infinities and NaNs are exact.
inline float within(double exact, double distance, float operand, uint32_t function) {
  const float nearest = static_cast<float>(exact);
  if (!like_hardware() || !(fabsf(nearest) < INFINITY)) return nearest;
  const float drawn = static_cast<float>(exact + deviation(operand, function) * (distance - 0.5 * ulp_of(exact)));
  return fabs(drawn - exact) <= distance ? drawn : nearest;  // floats above a power of two are farther apart
}
// The same in units of the last place. Zeros and subnormals are exact, too.
inline float within_ulps(double exact, double ulps, float operand, uint32_t function) {
  const float nearest = static_cast<float>(exact);
  return fabsf(nearest) >= 0x1p-126f ? within(exact, ulps * ulp_of(exact), operand, function) : nearest;
}

enum ApproximateFunction : uint32_t { ex2_, lg2_, rcp_, exp_, exp2_, log_, log2_, tanh_, sin_, cos_, sinpi_, cospi_, rsqrt_ };

}  // namespace emulation
