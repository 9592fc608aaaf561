// How far a function that the hardware approximates may be from the exact result. With Arithmetic::nearest it is the
// result of the host's mathematical library, a float next to the exact one. With Arithmetic::hardware it deviates by
// any amount that its documentation allows, chosen by the launch's seed and the same for equal operands.
#pragma once

#include "emulation/calls.cuh"

namespace emulation {

inline bool like_hardware() { return self().block->request->arithmetic == Arithmetic::hardware; }

// deviation.cuh: what these are with Arithmetic::hardware
float drawn_within(double exact, double distance, float operand, uint32_t function);
float drawn_within_ulps(double exact, int ulps, float operand, uint32_t function);

// The float nearest to `exact`, or one up to `distance` from it. Infinities and NaNs are exact.
inline float within(double exact, double distance, float operand, uint32_t function) {
  return like_hardware() ? drawn_within(exact, distance, operand, function) : static_cast<float>(exact);
}
// NVIDIA counts ulps from the correctly rounded result: that float, or one up to `ulps` floats away. Zeros are exact.
inline float within_ulps(double exact, int ulps, float operand, uint32_t function) {
  return like_hardware() ? drawn_within_ulps(exact, ulps, operand, function) : static_cast<float>(exact);
}

enum ApproximateFunction : uint32_t {
  ex2_, lg2_, rcp_, exp_, exp2_, log_, log2_, tanh_, sin_, cos_, sinpi_, cospi_, rsqrt_, erf_, exp10_, divide_
};

}  // namespace emulation
