// mbarriers, bulk copies and reductions, and what goes with warp specialisation: sm_90a.
#include "ptx/atomic.cuh"
#include "ptx/bulk.cuh"
#include "ptx/copy_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/grid.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/registers.cuh"
#include "ptx/warp.cuh"

constexpr int STAGES = 2;

// A producer warp loads `rounds` tiles of 512 floats by bulk copies; four consumer warps add them up.
extern "C" __global__ void __launch_bounds__(160) bulk_pipeline(const float* in, float* out, int rounds) {
  DYNAMIC_SHARED(shared);
  constexpr uint32_t TILE = 2048;
  const uint32_t data = ptx::shared_address(shared), full = data + STAGES * TILE, empty = full + 8 * STAGES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      ptx::mbarrier_init(full + 8 * s, 1);
      ptx::mbarrier_init(empty + 8 * s, 4);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (warp == 4) {
    for (int i = 0; i < rounds; i++) {
      const int s = i % STAGES, turn = i / STAGES;
      ptx::mbarrier_wait(empty + 8 * s, (turn & 1) ^ 1);
      __syncwarp();
      if (lane == 0) {
        if (i % 2) {  // announce and arrive apart
          ptx::mbarrier_expect_tx(full + 8 * s, TILE);
          ptx::mbarrier_arrive(full + 8 * s);
        } else {
          ptx::mbarrier_arrive_expect_tx(full + 8 * s, TILE);
        }
        ptx::bulk_load(data + s * TILE, in + i * 512, TILE / 2, full + 8 * s);
        ptx::bulk_load(data + s * TILE + TILE / 2, in + i * 512 + 256, TILE / 2, full + 8 * s,
                       ptx::CachePolicy::evict_first);
      }
    }
    return;
  }
  float sum[4] = {};
  for (int i = 0; i < rounds; i++) {
    const int s = i % STAGES, turn = i / STAGES;
    while (!ptx::mbarrier_try_wait(full + 8 * s, turn & 1)) {}
    for (int j = 0; j < 4; j++) sum[j] += ptx::load_shared_f32(data + s * TILE + 4 * (threadIdx.x + 128 * j));
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(empty + 8 * s);
  }
  for (int j = 0; j < 4; j++) out[threadIdx.x + 128 * j] = sum[j];
}

// One mbarrier tracks the cp.async of 64 threads: by their own arrivals (noinc), then by arrivals on top of theirs.
extern "C" __global__ void copy_arrivals(const uint32_t* in, uint32_t* out) {
  DYNAMIC_SHARED(shared);
  const int t = threadIdx.x;
  const uint32_t data = ptx::shared_address(shared), first = data + 2048, second = first + 8;
  if (t == 0) {
    ptx::mbarrier_init(first, 64);
    ptx::mbarrier_init(second, 64);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::cp_async<16>(data + 16 * t, in + 4 * t);
  ptx::cp_async_arrive_noinc(first);
  ptx::cp_async<16>(data + 1024 + 16 * t, in + 256 + 4 * t);
  ptx::cp_async_arrive(second);
  ptx::mbarrier_arrive(second);
  ptx::mbarrier_wait(first, 0);
  for (int i = 0; i < 4; i++) out[4 * t + i] = ptx::load_shared(data + 4 * (255 - 4 * t - i));
  ptx::mbarrier_wait(second, 0);
  for (int i = 0; i < 4; i++) out[256 + 4 * t + i] = ptx::load_shared(data + 1024 + 4 * (255 - 4 * t - i));
  __syncthreads();
  if (t == 0) {  // the memory of an mbarrier is used again after its end
    ptx::mbarrier_invalidate(first);
    ptx::mbarrier_init(first, 1);
    ptx::mbarrier_arrive(first);
    ptx::mbarrier_wait(first, 0);
  }
}

// Stores 256 words and adds 256 words to f32, 512 elements to f16 and to bf16, all from the same kind of shared tile.
// seen: the stored words as the thread reads them after its wait.
extern "C" __global__ void bulk_stores(const uint32_t* in, uint32_t* copy, float* f32, uint32_t* f16, uint32_t* bf16,
                                       uint32_t* seen) {
  DYNAMIC_SHARED(shared);
  const int t = threadIdx.x;
  const uint32_t data = ptx::shared_address(shared);
  for (int i = t; i < 1024; i += 128) ptx::store_shared(data + 4 * i, in[i]);
  ptx::fence_proxy_async();
  __syncthreads();
  if (t == 0) {
    ptx::bulk_store(copy, data, 1024);
    ptx::bulk_commit();
    ptx::bulk_reduce_add_f32(f32, data + 1024, 1024);
    ptx::bulk_commit();
    ptx::bulk_wait_read<1>();  // the first tile may change now
    ptx::store_shared(data, 0xDEADBEEFu);
    ptx::bulk_reduce_add_f16(f16, data + 2048, 1024);
    ptx::bulk_reduce_add_bf16(bf16, data + 3072, 1024);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
    for (int i = 0; i < 256; i++) seen[i] = copy[i];
  }
}

// stmatrix of every size; in: 14 words of each of 32 lanes, by word. out: what shared memory holds then.
extern "C" __global__ void matrix_stores(const uint32_t* in, uint32_t* out) {
  DYNAMIC_SHARED(shared);
  const int lane = threadIdx.x;
  const uint32_t base = ptx::shared_address(shared), row = base + 16 * lane;
  uint32_t word[14];
  for (int i = 0; i < 14; i++) word[i] = in[i * 32 + lane];
  const uint32_t one[2][1] = {{word[0]}, {word[1]}}, two[2][2] = {{word[2], word[3]}, {word[4], word[5]}};
  const uint32_t four[2][4] = {{word[6], word[7], word[8], word[9]}, {word[10], word[11], word[12], word[13]}};
  ptx::stmatrix_x1(row, one[0]);
  ptx::stmatrix_x1_trans(row + 128, one[1]);
  ptx::stmatrix_x2(row + 256, two[0]);
  ptx::stmatrix_x2_trans(row + 512, two[1]);
  ptx::stmatrix_x4(row + 768, four[0]);
  ptx::stmatrix_x4_trans(row + 1280, four[1]);
  __syncwarp();
  for (int i = lane; i < 448; i += 32) out[i] = ptx::load_shared(base + 4 * i);
}

// A warpgroup releases registers that two others need. One lane of each warp counts. Floats are added four at a time.
extern "C" __global__ void __launch_bounds__(384, 1) specialised(int* elected, float* sums, int* sum_of_lanes) {
  ptx::griddepcontrol_wait();
  if (threadIdx.x < 128) {
    ptx::setmaxnreg_dec<40>();
  } else {
    ptx::setmaxnreg_inc<232>();
  }
  if (ptx::elect_one()) atomicAdd(elected, 1);
  const float four[4] = {1.0f, 2.0f, 3.0f, static_cast<float>(threadIdx.x)};
  ptx::reduce_add_v4(sums + 4 * (threadIdx.x % 2), four);
  atomicAdd(sum_of_lanes, static_cast<int>(threadIdx.x % 32));
  ptx::griddepcontrol_launch_dependents();
}

// Threads of one warp write a block of global memory, which one of them then has copied back by the async proxy.
extern "C" __global__ void written_then_loaded(const uint32_t* in, uint32_t* middle, uint32_t* out) {
  DYNAMIC_SHARED(shared);
  const int t = threadIdx.x;
  const uint32_t data = ptx::shared_address(shared), barrier = data + 512;
  if (t == 0) {
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
  }
  if (t < 32) {
    const uint32_t words[4] = {in[4 * t] + 1, in[4 * t + 1] + 1, in[4 * t + 2] + 1, in[4 * t + 3] + 1};
    ptx::store_global_v4(middle + 4 * t, words);
  }
  ptx::fence_proxy_async_global();
  __syncthreads();
  if (t == 0) {
    ptx::mbarrier_arrive_expect_tx(barrier, 512);
    ptx::bulk_load(data, middle, 512, barrier);
  }
  ptx::mbarrier_wait(barrier, 0);
  out[t] = ptx::load_shared(data + 4 * t);
}
