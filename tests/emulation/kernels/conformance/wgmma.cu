// wgmma in groups that overlap, and descriptors: sm_90a. second_reading.cu tests every size and element.
#include "ptx/fence.cuh"
#include "ptx/memory.cuh"
#include "ptx/wgmma.cuh"

// Two products into accumulators that are not read before (accumulate false), in two groups that overlap: the first
// counts twice. descriptors: A and B of each. out: [128 threads][32]
extern "C" __global__ void __launch_bounds__(128) multiply_groups(const uint32_t* image, uint32_t image_bytes,
                                                                  const uint64_t* descriptors, float* out) {
  DYNAMIC_SHARED(shared);
  const uint32_t address = ptx::shared_address(shared);
  for (uint32_t i = threadIdx.x; i < image_bytes / 4; i += 128) ptx::store_shared(address + 4 * i, image[i]);
  ptx::fence_proxy_async();
  __syncthreads();
  const uint64_t base = address >> 4;
  constexpr int N = 64;
  constexpr ptx::Element E = ptx::Element::f16;
  float first[N / 2], second[N / 2];
  ptx::wgmma_fence();
  ptx::wgmma_ss<N, E>(first, descriptors[0] + base, descriptors[1] + base, false);
  ptx::wgmma_commit();
  ptx::wgmma_ss<N, E>(second, descriptors[2] + base, descriptors[3] + base, false);
  ptx::wgmma_commit();
  ptx::wgmma_wait<1>();
  ptx::pin_registers(first);
  float sum[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; i++) sum[i] = 2.0f * first[i];
  ptx::wgmma_wait<0>();
  ptx::pin_registers(second);
#pragma unroll
  for (int i = 0; i < N / 2; i++) out[threadIdx.x * (N / 2) + i] = sum[i] + second[i];
}

// Descriptors of the four layouts at `address`.
extern "C" __global__ void descriptors(uint32_t address, unsigned long long* out) {
  out[0] = ptx::matrix_descriptor<ptx::Swizzle::none, 128, 256>(address);
  out[1] = ptx::matrix_descriptor<ptx::Swizzle::b32, 16, 256>(address);
  out[2] = ptx::matrix_descriptor<ptx::Swizzle::b64, 4096, 512>(address);
  out[3] = ptx::matrix_descriptor<ptx::Swizzle::b128, 16384, 1024>(address);
}
