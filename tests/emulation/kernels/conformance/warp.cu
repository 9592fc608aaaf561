// Shuffles, votes, reductions and barriers: those of CUDA C++ itself, the named barriers, and atomics between
// blocks.
#include "ptx/atomic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/warp.cuh"

// out: 12 results of each of 32 lanes, by result
extern "C" __global__ void shuffles(const int* in, int* out) {
  const int lane = threadIdx.x;
  const int v = in[lane];
  int results[12] = {
      __shfl_sync(~0u, v, 5),
      __shfl_sync(~0u, v, lane * 3, 8),
      __shfl_xor_sync(~0u, v, 1),
      __shfl_xor_sync(~0u, v, 16),
      __shfl_xor_sync(~0u, v, 4, 4),
      __shfl_up_sync(~0u, v, 3),
      __shfl_up_sync(~0u, v, 1, 8),
      __shfl_down_sync(~0u, v, 7),
      __shfl_down_sync(~0u, v, 2, 16),
      ptx::warp_uniform(v),
      __float_as_int(__shfl_xor_sync(~0u, __int_as_float(v), 8)),
      0,
  };
  if (lane < 16) results[11] = __shfl_sync(0x0000FFFFu, v, 15 - lane);  // half a warp
  else results[11] = __shfl_sync(0xFFFF0000u, v, 47 - lane);
  for (int i = 0; i < 12; i++) out[i * 32 + lane] = results[i];
}

extern "C" __global__ void votes(const int* in, int* out) {
  const int lane = threadIdx.x;
  const int v = in[lane];
  const int results[6] = {
      static_cast<int>(__ballot_sync(~0u, v & 1)),
      __any_sync(~0u, v == in[7]),
      __all_sync(~0u, v != 0),
      __reduce_add_sync(~0u, v),
      __reduce_max_sync(~0u, v),
      __reduce_min_sync(~0u, v),
  };
  for (int i = 0; i < 6; i++) out[i * 32 + lane] = results[i];
}

// 96 threads: the block's sum of in, by __syncthreads and static shared memory; then its votes
extern "C" __global__ void block_sum(const int* in, int* out) {
  __shared__ int part[96];
  part[threadIdx.x] = in[blockIdx.x * 96 + threadIdx.x];
  __syncthreads();
  for (int half = 48; half >= 3; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    __syncthreads();
  }
  const int sum = part[0] + part[1] + part[2];
  const int odd = __syncthreads_count(in[blockIdx.x * 96 + threadIdx.x] & 1);
  const int any = __syncthreads_or(threadIdx.x == 95), all = __syncthreads_and(threadIdx.x != 95);
  if (threadIdx.x == 0) {
    out[blockIdx.x * 4] = sum;
    out[blockIdx.x * 4 + 1] = odd;
    out[blockIdx.x * 4 + 2] = any;
    out[blockIdx.x * 4 + 3] = all;
  }
}

// Warp 0 produces `rounds` values for warps 1 to 3 through one slot: barrier 1 says full, barrier 2 says empty.
extern "C" __global__ void named_barriers(int* out, int rounds) {
  __shared__ int slot[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int sum = 0;
  for (int i = 0; i < rounds; i++) {
    if (warp == 0) {
      if (i) ptx::barrier_sync(2, 128);
      slot[lane] = i * 100 + lane;
      ptx::barrier_arrive(1, 128);
    } else {
      ptx::barrier_sync(1, 128);
      sum += slot[31 - lane];
      if (i + 1 < rounds) ptx::barrier_arrive(2, 128);
    }
  }
  if (warp) out[threadIdx.x - 32] = sum;
}

// Warp 0 arrives at barrier 1 and goes on to barrier 2, where warp 1 waits before it comes to barrier 1.
extern "C" __global__ void crossed_barriers(int* out) {
  __shared__ int slot[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 0) {
    slot[lane] = 3 * lane;
    ptx::barrier_arrive(1, 64);
    ptx::barrier_sync(2, 64);
  } else {
    ptx::barrier_sync(2, 64);
    ptx::barrier_sync(1, 64);
    out[lane] = slot[31 - lane];
  }
}

// Every block adds its part; the last one to arrive reads what all of them wrote.
extern "C" __global__ void last_arrival(float* parts, int* arrived, float* out, float* sums) {
  __shared__ int last;
  parts[blockIdx.x * 32 + threadIdx.x] = blockIdx.x + threadIdx.x * 0.5f;
  ptx::reduce_add(sums + threadIdx.x, blockIdx.x);
  atomicMax(arrived + 1, static_cast<int>(blockIdx.x) * 2);
  atomicMin(arrived + 2, -static_cast<int>(blockIdx.x));
  atomicCAS(arrived + 3, 0, 7);
  atomicExch(arrived + 4, 9);
  __syncthreads();
  if (threadIdx.x == 0) last = ptx::atomic_add_acq_rel(arrived, 1) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  float sum = 0.0f;
  for (int b = 0; b < gridDim.x; b++) sum += parts[b * 32 + threadIdx.x];
  out[threadIdx.x] = sum;
}

// Blocks take turns in the order of the numbers that they draw: a semaphore between blocks.
extern "C" __global__ void turns(int* drawn, int* turn, int* order, int* released) {
  if (threadIdx.x == 0) {
    const int number = atomicAdd(drawn, 1);
    while (ptx::load_acquire(turn) != number) {}
    order[*turn] = number * 10;
    ptx::reduce_add_release(released, 1);
    ptx::store_release(turn, number + 1);
  }
  __syncthreads();
}
