// Attention for sm_90a: a producer warp brings tiles by TMA, a warpgroup multiplies them by wgmma, P stays in
// registers, the output leaves through shared memory by stmatrix and TMA.
#include "attention.cuh"

using ptx::Element;
using ptx::Swizzle;

struct Layout {
  uint32_t q, k, v, q_full, k_full, v_full, empty;
};
DEVICE Layout layout_of(uint32_t base) {
  const uint32_t k = base + TILE_BYTES, v = k + STAGES * TILE_BYTES, barriers = v + STAGES * TILE_BYTES;
  return {base, k, v, barriers, barriers + 8, barriers + 8 + 8 * STAGES, barriers + 8 + 16 * STAGES};
}

DEVICE void produce(const Params& p, const Layout& at, int tiles) {
  const bool leader = threadIdx.x % 32 == 0;
  if (leader) {
    ptx::mbarrier_arrive_expect_tx(at.q_full, TILE_BYTES);
    ptx::tma_load(at.q, &p.q, at.q_full, 0, static_cast<int>(blockIdx.x) * TILE, static_cast<int>(blockIdx.y),
                  ptx::CachePolicy::evict_first);
  }
  for (int n = 0; n < tiles; n++) {
    const int stage = n % STAGES;
    if (BUG != 1) ptx::mbarrier_wait(at.empty + 8 * stage, n / STAGES % 2 ^ 1);
    __syncwarp();
    if (!leader) continue;
    ptx::mbarrier_arrive_expect_tx(at.k_full + 8 * stage, BUG == 2 ? TILE_BYTES / 2 : TILE_BYTES);
    ptx::tma_load(at.k + stage * TILE_BYTES, &p.k, at.k_full + 8 * stage, 0, n * TILE, static_cast<int>(blockIdx.y));
    ptx::mbarrier_arrive_expect_tx(at.v_full + 8 * stage, TILE_BYTES);
    ptx::tma_load(at.v + stage * TILE_BYTES, &p.v, at.v_full + 8 * stage, 0, n * TILE, static_cast<int>(blockIdx.y));
  }
}

// The warpgroup's output tile, through Q's place.
DEVICE void store_output(const Params& p, const Layout& at, const float (&o)[32]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp * 16 + lane % 16;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const uint32_t r[4] = {pack(o[4 * j], o[4 * j + 1]), pack(o[4 * j + 2], o[4 * j + 3]),
                           pack(o[4 * j + 4], o[4 * j + 5]), pack(o[4 * j + 6], o[4 * j + 7])};
    ptx::stmatrix_x4(at.q + row * 128 + (((j + lane / 16) ^ (row & 7)) << 4), r);
  }
  if (BUG == 3) {
    if (threadIdx.x == 0) ptx::fence_proxy_async();
  } else if (BUG != 4) {
    ptx::fence_proxy_async();
  }
  if (BUG != 5) ptx::barrier_sync(1, 128);
  if (threadIdx.x == 0) {
    ptx::tma_store(&p.out, at.q, 0, static_cast<int>(blockIdx.x) * TILE, static_cast<int>(blockIdx.y));
    ptx::bulk_commit();
    if (BUG != 6) ptx::bulk_wait_read<0>();
  }
}

DEVICE void consume(const Params& p, const Layout& at, int tiles) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = static_cast<int>(blockIdx.x) * TILE + warp * 16 + lane / 4;
  float s[32], o[32];
#pragma unroll
  for (int i = 0; i < 32; i++) o[i] = 0.0f;
  Softmax softmax;
  softmax.start();
  const uint64_t q = ptx::matrix_descriptor<Swizzle::b128, 16, 1024>(at.q);
  ptx::mbarrier_wait(at.q_full, 0);
  for (int n = 0; n < tiles; n++) {
    const int stage = n % STAGES, parity = BUG == 7 ? 0 : n / STAGES % 2;
    const uint64_t k = ptx::matrix_descriptor<Swizzle::b128, 16, 1024>(at.k + stage * TILE_BYTES);
    const uint64_t v = ptx::matrix_descriptor<Swizzle::b128, 16, 1024>(at.v + stage * TILE_BYTES);
    if (BUG != 8) ptx::mbarrier_wait(at.k_full + 8 * stage, parity);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) ptx::wgmma_ss<TILE, Element::f16>(s, q + 2 * step, k + 2 * step, step > 0);
    ptx::wgmma_commit();
    if (BUG != 9) ptx::wgmma_wait<0>();
    ptx::pin_registers(s);
    softmax.mask(p, s, row, n * TILE);
    softmax.update(s, o, p.scale * 1.44269504f);
    uint32_t a[4][4];
#pragma unroll
    for (int i = 0; i < 16; i++) a[i / 4][i % 4] = pack(s[2 * i], s[2 * i + 1]);
    ptx::mbarrier_wait(at.v_full + 8 * stage, parity);
    if (BUG != 10) ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 4; step++) ptx::wgmma_rs<HEAD_DIM, Element::f16, true>(o, a[step], v + 128 * step, true);
    ptx::wgmma_commit();
    if (BUG == 11 && lane == 0) ptx::mbarrier_arrive(at.empty + 8 * stage);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(o);
    if (BUG != 11 && lane == 0) ptx::mbarrier_arrive(at.empty + 8 * stage);
  }
  float lse[2];
  softmax.finish(o, lse, p.scale * 1.44269504f);
  store_output(p, at, o);
  for (int h = 0; h < 2; h++)
    if (lane % 4 == 0 && row + 8 * h < p.seqlen_q)
      p.lse[static_cast<int64_t>(blockIdx.y) * p.seqlen_q + row + 8 * h] = lse[h];
}

extern "C" __global__ void __launch_bounds__(160, 1) attention(const __grid_constant__ Params p) {
  DYNAMIC_SHARED(shared);
  const Layout at = layout_of(ptx::shared_address(shared));
  const int tiles = key_tiles(p, static_cast<int>(blockIdx.x) * TILE);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(at.q_full, 1);
    for (int i = 0; i < STAGES; i++) {
      ptx::mbarrier_init(at.k_full + 8 * i, 1);
      ptx::mbarrier_init(at.v_full + 8 * i, 1);
      ptx::mbarrier_init(at.empty + 8 * i, 4);
    }
    if (BUG != 12) ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x >= 128) produce(p, at, tiles);
  else consume(p, at, tiles);
}
