// Conversions between floats and 16-bit words, packed pairs, and the fast special functions: one thread an element.
#include "ptx/convert.cuh"
#include "ptx/halves.cuh"
#include "ptx/math.cuh"
#include "ptx/pack.cuh"

// out: each 16-bit word as float16, in float
extern "C" __global__ void widen(const uint16_t* in, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = ptx::half_to_float(in[i]);
}

// out: n words of one half, then n words of two halves, then n words of two bfloat16
extern "C" __global__ void narrow(const float* low, const float* high, uint32_t* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[i] = ptx::float_to_half(low[i]);
  out[n + i] = ptx::pack_half(low[i], high[i]);
  out[2 * n + i] = ptx::pack_bfloat16(low[i], high[i]);
}

// out: n of ex2, n of lg2, n of rcp
extern "C" __global__ void special(const float* in, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[i] = ptx::ex2(in[i]);
  out[n + i] = ptx::lg2(in[i]);
  out[2 * n + i] = ptx::rcp(in[i]);
}

// out: n of sin(pi x), n of cos(pi x)
extern "C" __global__ void circle(const float* in, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[i] = sinpi_of(in[i]);
  out[n + i] = cospi_of(in[i]);
}

// out: n products of pairs of halves, then n of pairs of bfloat16
extern "C" __global__ void multiply_pairs(const uint32_t* a, const uint32_t* b, uint32_t* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[i] = ptx::multiply_halves(a[i], b[i]);
  out[n + i] = ptx::multiply_bfloat16s(a[i], b[i]);
}
