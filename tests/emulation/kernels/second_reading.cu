// Instructions on raw registers, addresses and descriptors, to compare with the second reading of the ISA
// (tests/lib/isa). No layout is used. Macro WGMMA_CASES: CASE(number, element, A transposed, B transposed, N) each.
#include "ptx/bulk.cuh"
#include "ptx/copy_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

using ptx::Element;

#ifndef WGMMA_CASES
#define WGMMA_CASES CASE(0, f16, false, false, 64)
#endif

// ---- products: `count` of them, one after the other, on the same image of shared memory
struct Products {
  const uint32_t* image;
  uint32_t image_bytes;
  int number, count, accumulate;
  const uint64_t* descriptors;  // [count][A, B], whose addresses count from the image's start
  const uint32_t* a;            // [count][128 threads][4]
  float* d;                     // [count][128 threads][N / 2], before and after
};

template <Element E, bool TRANS_A, bool TRANS_B, int N, bool REGISTERS, Element B = E>
DEVICE void multiply_all(const Products& p, uint64_t base) {
  for (int i = 0; i < p.count; i++) {
    float d[N / 2];
    uint32_t a[4] = {};
    float* const own = p.d + (i * 128 + threadIdx.x) * (N / 2);
#pragma unroll
    for (int j = 0; j < N / 2; j++) d[j] = own[j];
#pragma unroll
    for (int j = 0; REGISTERS && j < 4; j++) a[j] = p.a[(i * 128 + threadIdx.x) * 4 + j];
    ptx::wgmma_fence();
    if constexpr (REGISTERS) ptx::wgmma_rs<N, E, TRANS_B, B>(d, a, p.descriptors[2 * i + 1] + base, p.accumulate);
    else
      ptx::wgmma_ss<N, E, TRANS_A, TRANS_B>(d, p.descriptors[2 * i] + base, p.descriptors[2 * i + 1] + base,
                                            p.accumulate);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::pin_registers(d);
    ptx::pin_registers(a);
#pragma unroll
    for (int j = 0; j < N / 2; j++) own[j] = d[j];
  }
}

DEVICE uint64_t place_image(const Products& p) {
  DYNAMIC_SHARED(shared);
  const uint32_t base = ptx::shared_address(shared);
  for (uint32_t i = threadIdx.x; i < p.image_bytes / 4; i += 128) ptx::store_shared(base + 4 * i, p.image[i]);
  ptx::fence_proxy_async();
  __syncthreads();
  return base >> 4;
}

extern "C" __global__ void __launch_bounds__(128) products_shared(const __grid_constant__ Products p) {
  const uint64_t base = place_image(p);
#define CASE(number_, element, trans_a, trans_b, n) \
  if (p.number == number_) multiply_all<Element::element, trans_a, trans_b, n, false>(p, base);
  WGMMA_CASES
#undef CASE
}

extern "C" __global__ void __launch_bounds__(128) products_registers(const __grid_constant__ Products p) {
  const uint64_t base = place_image(p);
#define CASE(number_, element, trans_a, trans_b, n) \
  if (p.number == number_) multiply_all<Element::element, trans_a, trans_b, n, true>(p, base);
  WGMMA_CASES
#undef CASE
}

extern "C" __global__ void __launch_bounds__(128) products_mixed(const __grid_constant__ Products p) {
  multiply_all<Element::e4m3, false, false, 72, true, Element::e5m2>(p, place_image(p));
}

// ---- ldmatrix and stmatrix at any addresses
// in: shared memory. rows: offset of each lane's row. out: [6 forms][4 words][32 lanes]
extern "C" __global__ void load_rows(const uint32_t* in, const uint32_t* rows, uint32_t* out, uint32_t bytes) {
  DYNAMIC_SHARED(shared);
  const int lane = threadIdx.x;
  const uint32_t base = ptx::shared_address(shared), row = base + rows[lane];
  for (uint32_t i = lane; i < bytes / 4; i += 32) ptx::store_shared(base + 4 * i, in[i]);
  __syncwarp();
  uint32_t one[1], two[2], four[4];
  ptx::ldmatrix_x1(one, row);
  out[lane] = one[0];
  ptx::ldmatrix_x1_trans(one, row);
  out[128 + lane] = one[0];
  ptx::ldmatrix_x2(two, row);
  for (int i = 0; i < 2; i++) out[256 + 32 * i + lane] = two[i];
  ptx::ldmatrix_x2_trans(two, row);
  for (int i = 0; i < 2; i++) out[384 + 32 * i + lane] = two[i];
  ptx::ldmatrix_x4(four, row);
  for (int i = 0; i < 4; i++) out[512 + 32 * i + lane] = four[i];
  ptx::ldmatrix_x4_trans(four, row);
  for (int i = 0; i < 4; i++) out[640 + 32 * i + lane] = four[i];
}

// memory: shared memory before and after. form: 0 .. 5 as above. words: [4][32 lanes]
extern "C" __global__ void store_rows(uint32_t* memory, const uint32_t* rows, const uint32_t* words, uint32_t bytes,
                                      int form) {
  DYNAMIC_SHARED(shared);
  const int lane = threadIdx.x;
  const uint32_t base = ptx::shared_address(shared), row = base + rows[lane];
  for (uint32_t i = lane; i < bytes / 4; i += 32) ptx::store_shared(base + 4 * i, memory[i]);
  __syncwarp();
  const uint32_t four[4] = {words[lane], words[32 + lane], words[64 + lane], words[96 + lane]};
  const uint32_t two[2] = {four[0], four[1]}, one[1] = {four[0]};
  if (form == 0) ptx::stmatrix_x1(row, one);
  if (form == 1) ptx::stmatrix_x1_trans(row, one);
  if (form == 2) ptx::stmatrix_x2(row, two);
  if (form == 3) ptx::stmatrix_x2_trans(row, two);
  if (form == 4) ptx::stmatrix_x4(row, four);
  if (form == 5) ptx::stmatrix_x4_trans(row, four);
  __syncwarp();
  for (uint32_t i = lane; i < bytes / 4; i += 32) memory[i] = ptx::load_shared(base + 4 * i);
}

// ---- one thread works an mbarrier. steps: [count][what, with which number]
struct BarrierSteps {
  const int* steps;
  const uint32_t* source;
  int count, expected;
};

extern "C" __global__ void barrier_steps(const __grid_constant__ ptx::TensorMap map,
                                         const __grid_constant__ BarrierSteps p) {
  DYNAMIC_SHARED(shared);
  const uint32_t data = ptx::shared_address(shared), barrier = data + 4096;
  ptx::mbarrier_init(barrier, p.expected);
  ptx::fence_mbarrier_init();
  for (int i = 0; i < p.count; i++) {
    const int what = p.steps[2 * i], number = p.steps[2 * i + 1];
    if (what == 0) ptx::mbarrier_arrive(barrier);
    if (what == 1) ptx::mbarrier_expect_tx(barrier, number);
    if (what == 2) ptx::mbarrier_arrive_expect_tx(barrier, number);
    if (what == 3) ptx::bulk_load(data, p.source, number, barrier);
    if (what == 4) ptx::tma_load(data, &map, barrier, number);
    if (what == 5) ptx::mbarrier_wait(barrier, number);
    if (what == 6) ptx::cp_async_arrive_noinc(barrier);
    if (what == 7) ptx::cp_async_arrive(barrier);
  }
}
