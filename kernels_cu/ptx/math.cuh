// The special functions: fast ones as single instructions, exact ones by overload for float and double.
// The fast ones flush subnormals; ex2 and rcp are within 2 ulp, lg2 within 2^-22 absolute near 1 (PTX ISA 9.7.3).
#pragma once

#include "ptx/convert.cuh"

namespace ptx {

WRAPPER float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

WRAPPER float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

WRAPPER float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ptx

WRAPPER float exp_of(float x) { return expf(x); }
WRAPPER double exp_of(double x) { return exp(x); }
WRAPPER float log_of(float x) { return logf(x); }
WRAPPER double log_of(double x) { return log(x); }
WRAPPER float tanh_of(float x) { return tanhf(x); }
WRAPPER double tanh_of(double x) { return tanh(x); }

// sin and cos of pi * x, within 2 ulp; reducing x needs no table, as that of sin and cos would.
WRAPPER float sinpi_of(float x) { return sinpif(x); }
WRAPPER float cospi_of(float x) { return cospif(x); }

// The larger of two, or the number if one of them is NaN.
WRAPPER float max_of(float a, float b) { return fmaxf(a, b); }
WRAPPER double max_of(double a, double b) { return fmax(a, b); }
