// The functions that generated score modifications are written in, for float and double alike.
#pragma once

#include "ptx/math.cuh"
#include "common/types.cuh"

DEVICE float sqrt_of(float x) { return sqrtf(x); }
DEVICE double sqrt_of(double x) { return sqrt(x); }

// Angles in half turns, within [-1, 1]: 2 pi as the sum of two floats is taken off (Cody and Waite, "Software Manual for the
// Elementary Functions", 1980), exactly up to 2^24. The library's own functions keep a table on the stack for larger ones.
DEVICE float half_turns(float x) {
  const float turns = rintf(x * 0.15915494f);
  return fmaf(turns, 1.7484555e-7f, fmaf(turns, -6.2831855f, x)) * 0.31830989f;
}
DEVICE float sin_of(float x) { return sinpi_of(half_turns(x)); }
DEVICE double sin_of(double x) { return sin(x); }
DEVICE float cos_of(float x) { return cospi_of(half_turns(x)); }
DEVICE double cos_of(double x) { return cos(x); }
DEVICE float tan_of(float x) {
  const float turns = half_turns(x);
  return sinpi_of(turns) / cospi_of(turns);
}
DEVICE double tan_of(double x) { return tan(x); }

DEVICE float floor_of(float x) { return floorf(x); }
DEVICE double floor_of(double x) { return floor(x); }
DEVICE float erf_of(float x) { return erff(x); }
DEVICE double erf_of(double x) { return erf(x); }
DEVICE float abs_of(float x) { return fabsf(x); }
DEVICE double abs_of(double x) { return fabs(x); }
DEVICE int abs_of(int x) { return x < 0 ? -x : x; }

// Like NumPy's: a NaN on either side is the result.
template <class Real>
DEVICE Real maximum_of(Real a, Real b) {
  return a >= b || a != a ? a : b;
}
template <class Real>
DEVICE Real minimum_of(Real a, Real b) {
  return a <= b || a != a ? a : b;
}

template <class Real>
DEVICE Real sigmoid_of(Real x) {
  return Real(1) / (Real(1) + exp_of(-x));
}

// The normal distribution's function and density, of which gelu(x) = x * normal_cdf(x) is made.
template <class Real>
DEVICE Real normal_cdf(Real x) {
  return Real(0.5) * (Real(1) + erf_of(x * Real(0.70710678118654752440)));
}
template <class Real>
DEVICE Real normal_density(Real x) {
  return Real(0.39894228040143267794) * exp_of(Real(-0.5) * x * x);
}

template <class Real>
DEVICE Real sign_of(Real x) {
  return Real(x > 0) - Real(x < 0);
}

DEVICE float remainder_of(float a, float b) { return fmodf(a, b); }
DEVICE double remainder_of(double a, double b) { return fmod(a, b); }

// Quotients rounded down, and remainders with the sign of the divisor, like Python's. Those of floats use an exact
// remainder, because the quotient may have more digits than a float, or none left with an infinite divisor.
DEVICE int floor_divide(int a, int b) { return a / b - (a % b != 0 && (a % b < 0) != (b < 0)); }
DEVICE int modulo(int a, int b) { return a - floor_divide(a, b) * b; }
template <class Real>
DEVICE Real modulo(Real a, Real b) {
  const Real rest = remainder_of(a, b);
  return rest != Real(0) && (rest < Real(0)) != (b < Real(0)) ? rest + b : rest;
}
template <class Real>
DEVICE Real floor_divide(Real a, Real b) {
  if (b == Real(0)) return a / b;
  const Real rest = remainder_of(a, b);
  Real quotient = (a - rest) / b;  // whole, but for its rounding
  if (rest != Real(0) && (rest < Real(0)) != (b < Real(0))) quotient -= Real(1);
  const Real whole = floor_of(quotient);
  return quotient - whole > Real(0.5) ? whole + Real(1) : whole;
}
