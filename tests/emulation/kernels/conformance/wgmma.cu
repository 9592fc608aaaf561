// wgmma of every size and element, from shared memory and from registers, by any descriptor: sm_90a.
// The macro WGMMA_CASES lists what is compiled: CASE(number, element, A transposed, B transposed, N) each.
#include "ptx/convert.cuh"
#include "ptx/fence.cuh"
#include "ptx/memory.cuh"
#include "ptx/wgmma.cuh"

using ptx::Element;

#ifndef WGMMA_CASES
#define WGMMA_CASES CASE(0, f16, false, false, 64) CASE(1, bf16, true, true, 256) CASE(2, e4m3, false, false, 8)
#endif

struct Operands {
  const uint32_t* image;  // of shared memory: both operands
  uint32_t image_bytes;
  int number;                   // of the case
  uint64_t a, b;                // descriptors; their addresses count from the image's start
  uint64_t a_step, b_step;      // what the second K step adds to them
  const uint32_t* a_registers;  // [2 K steps][128 threads][4], where A comes from registers
  const float* c;
  float* d;  // 64 x n, like c
};

template <int N>
DEVICE void exchange(const Operands& p, float (&d)[N / 2], bool load) {
  const int t = threadIdx.x, lane = t % 32;
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    const int row = 16 * (t / 32) + lane / 4 + 8 * (i / 2 % 2), column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    if (load) d[i] = p.c[row * N + column];
    else p.d[row * N + column] = d[i];
  }
}

// d = c + two K steps of a b
template <Element E, bool TRANS_A, bool TRANS_B, int N, bool REGISTERS, Element B = E>
DEVICE void multiply(const Operands& p, uint64_t base) {
  float d[N / 2];
  uint32_t a[2][4];
  exchange<N>(p, d, true);
#pragma unroll
  for (int i = 0; REGISTERS && i < 8; i++) a[i / 4][i % 4] = p.a_registers[(i / 4 * 128 + threadIdx.x) * 4 + i % 4];
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const uint64_t b = p.b + base + k * p.b_step;
    if constexpr (REGISTERS) ptx::wgmma_rs<N, E, TRANS_B, B>(d, a[k], b, true);
    else ptx::wgmma_ss<N, E, TRANS_A, TRANS_B>(d, p.a + base + k * p.a_step, b, true);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::pin_registers(d);
  exchange<N>(p, d, false);
}

// Shared memory becomes the image; returns what the image's address adds to a descriptor.
DEVICE uint64_t place_image(const Operands& p) {
  DYNAMIC_SHARED(shared);
  const uint32_t base = ptx::shared_address(shared);
  for (uint32_t i = threadIdx.x; i < p.image_bytes / 4; i += 128) ptx::store_shared(base + 4 * i, p.image[i]);
  ptx::fence_proxy_async();
  __syncthreads();
  return base >> 4;
}

extern "C" __global__ void __launch_bounds__(128) multiply_shared(const __grid_constant__ Operands p) {
  const uint64_t base = place_image(p);
#define CASE(number_, element, trans_a, trans_b, n) \
  if (p.number == number_) multiply<Element::element, trans_a, trans_b, n, false>(p, base);
  WGMMA_CASES
#undef CASE
}

extern "C" __global__ void __launch_bounds__(128) multiply_registers(const __grid_constant__ Operands p) {
  const uint64_t base = place_image(p);
#define CASE(number_, element, trans_a, trans_b, n) \
  if (p.number == number_) multiply<Element::element, trans_a, trans_b, n, true>(p, base);
  WGMMA_CASES
#undef CASE
}

// The cases' A in registers, and a B of e5m2: where WGMMA_MIXED.
extern "C" __global__ void __launch_bounds__(128) multiply_mixed(const __grid_constant__ Operands p) {
  const uint64_t base = place_image(p);
#define CASE(number_, element, trans_a, trans_b, n) \
  if (p.number == number_) multiply<Element::element, trans_a, trans_b, n, true, Element::e5m2>(p, base);
#ifdef WGMMA_MIXED
  WGMMA_CASES
#endif
#undef CASE
}

// Two products into one accumulator that is not read before (accumulate false), in two groups that overlap.
extern "C" __global__ void __launch_bounds__(128) multiply_groups(const __grid_constant__ Operands p) {
  const uint64_t base = place_image(p);
  constexpr int N = 64;
  constexpr Element E = Element::f16;
  float first[N / 2], second[N / 2];
  ptx::wgmma_fence();
  ptx::wgmma_ss<N, E>(first, p.a + base, p.b + base, false);
  ptx::wgmma_commit();
  ptx::wgmma_ss<N, E>(second, p.a + base + p.a_step, p.b + base + p.b_step, false);
  ptx::wgmma_commit();
  ptx::wgmma_wait<1>();
  ptx::pin_registers(first);
  float sum[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; i++) sum[i] = 2.0f * first[i];
  ptx::wgmma_wait<0>();
  ptx::pin_registers(second);
#pragma unroll
  for (int i = 0; i < N / 2; i++) sum[i] += second[i];
  exchange<N>(p, sum, false);
}

// Descriptors of the four layouts at `address`.
extern "C" __global__ void descriptors(uint32_t address, unsigned long long* out) {
  out[0] = ptx::matrix_descriptor<ptx::Swizzle::none, 128, 256>(address);
  out[1] = ptx::matrix_descriptor<ptx::Swizzle::b32, 16, 256>(address);
  out[2] = ptx::matrix_descriptor<ptx::Swizzle::b64, 4096, 512>(address);
  out[3] = ptx::matrix_descriptor<ptx::Swizzle::b128, 16384, 1024>(address);
}
