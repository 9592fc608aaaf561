// The special functions: fast ones as single instructions, exact ones by overload for float and double.
// The fast ones flush subnormals; ex2 and rcp are within 2 ulp, lg2 within 2^-22 absolute near 1 (PTX ISA 9.7.3).
#pragma once

#include "ptx/convert.cuh"

namespace ptx {

DEVICE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ptx

DEVICE float exp_of(float x) { return expf(x); }
DEVICE double exp_of(double x) { return exp(x); }
DEVICE float log_of(float x) { return logf(x); }
DEVICE double log_of(double x) { return log(x); }
DEVICE float tanh_of(float x) { return tanhf(x); }
DEVICE double tanh_of(double x) { return tanh(x); }

// sin and cos of pi * x, within 2 ulp; reducing x needs no table, as that of sin and cos would.
DEVICE float sinpi_of(float x) { return sinpif(x); }
DEVICE float cospi_of(float x) { return cospif(x); }

// The larger of two, and the number where one of them is NaN.
DEVICE float max_of(float a, float b) { return fmaxf(a, b); }
DEVICE double max_of(double a, double b) { return fmax(a, b); }
