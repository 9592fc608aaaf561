// Small kernels that are right with bug 0 and wrong in one way with any other. All take (in, out, bug).
#include "ptx.cuh"

using ptx::Element;

// ---- memory
extern "C" __global__ void accesses(const float* in, float* out, int bug) {
  DYNAMIC_SHARED(shared);  // 128 floats
  float* mine = reinterpret_cast<float*>(shared);
  const int t = threadIdx.x;  // of 64
  const uint32_t base = ptx::shared_address(shared);
  mine[t] = in[t];
  if (t == 37) {
    if (bug == 1) out[64] = 1.0f;           // one past the end
    if (bug == 2) mine[t] = in[-1 - 4096];  // far before the beginning
    if (bug == 3) out[1 << 20] = 1.0f;      // a wrong stride
    if (bug == 4) out[-1] = 1.0f;           // just before the beginning
    if (bug == 5) mine[128] = 1.0f;         // just past shared memory
    if (bug == 6) mine[1 << 14] = 1.0f;     // far past shared memory
    if (bug == 7) ptx::store_shared(base + 512, 1);
    if (bug == 8) ptx::store_shared(base + 2, 1);
    if (bug == 9) ptx::cp_async<16>(base, in + 62);
    if (bug == 10) ptx::cp_async<16>(base, in + 1);
    if (bug == 11) *reinterpret_cast<volatile float*>(0x10) = 1.0f;
    if (bug == 12) __trap();
    if (bug == 13) mine[t] = static_cast<float>(7 / static_cast<int>(in[0]));
    if (bug == 14) ptx::shared_address(out);
    if (bug == 15) *reinterpret_cast<float4*>(out + 5) = float4{};
    if (bug == 16) mine[t] = reinterpret_cast<const float2*>(mine + 9)->y;
  }
  ptx::cp_async_wait_all();
  __syncthreads();
  out[t] = mine[63 - t];
}

static __device__ __noinline__ float descend(const float* in, int depth) {
  volatile float here[1024];
  for (int i = 0; i < 1024; i++) here[i] = in[i % 64];
  return depth ? descend(in, depth - 1) + here[depth] : here[0];
}
extern "C" __global__ void deep(const float* in, float* out, int bug) { out[threadIdx.x] = descend(in, bug ? 100 : 3); }

extern "C" __global__ void spins(const float* in, float* out, int bug) {
  if (bug == 1) {
    while (*reinterpret_cast<const volatile float*>(in) < 1e30f) {}
  }
  if (bug == 2) {
    while (ptx::load_acquire(reinterpret_cast<const int*>(in)) != 12345) {}
  }
  out[threadIdx.x] = in[threadIdx.x];
}

// ---- threads that wait for each other; 128 threads
extern "C" __global__ void exchanges(const float* in, float* out, int bug) {
  DYNAMIC_SHARED(shared);
  float* buffer = reinterpret_cast<float*>(shared);
  const int t = threadIdx.x, warp = t / 32, lane = t % 32;
  float sum = 0.0f;
  for (int round = 0; round < 3; round++) {
    buffer[t] = in[t] + round;
    if (bug != 1) __syncthreads();
    sum += buffer[127 - t];
    if (bug != 2) __syncthreads();
  }
  buffer[t] = sum;
  if (bug != 3) __syncwarp();
  sum = buffer[warp * 32 + (31 - lane)];
  if (bug == 4 && warp == 0) __syncthreads();
  if (bug == 4 && warp != 0) ptx::barrier_sync(4, 128);
  if (bug == 5 && warp == 1) ptx::barrier_sync(3, 64);
  if (bug == 6 && lane < 16) sum = __shfl_xor_sync(~0u, sum, 1);
  if (bug == 6 && lane >= 16) __syncwarp();
  if (bug == 7) sum = __shfl_sync(0xFFu << 8 * (lane / 8), sum, (lane + 8) % 32);
  if (bug == 8 && warp < 3) ptx::barrier_sync(1, warp < 2 ? 96 : 128);
  if (bug == 9 && warp == 2) ptx::barrier_arrive(5, 128);
  if (bug == 10) ptx::barrier_sync(16, 128);
  if (bug == 11) ptx::barrier_sync(1, 100);
  if (bug == 12 && lane == 0) return;
  if (bug == 12) __syncwarp();
  if (bug == 13 && warp == 0 && lane < 16) ptx::barrier_arrive(5, 32);
  if (bug == 13 && warp == 0 && lane >= 16) ptx::barrier_sync(5, 32);
  out[t] = sum;
}

// ---- one warp waits for what the other has stored; 64 threads
extern "C" __global__ void passes(const float* in, float* out, int bug) {
  int* const turn = reinterpret_cast<int*>(out + 64);
  const int t = threadIdx.x;
  if (t >= 32) {
    out[t] = in[t];
    __syncwarp();
    if (t != 32) return;
    if (bug == 0) ptx::store_release(turn, 1);
    if (bug == 1) *turn = 1;
    if (bug == 2) atomicExch(turn, 1);  // no bug: an atomic may continue a release sequence
    if (bug == 3) __threadfence();      // no bug: the fence makes the store a release
    if (bug == 3) *turn = 1;
    return;
  }
  while (t == 0 && ptx::load_acquire(turn) != 1) {}
  __syncwarp();
  out[t] = out[32 + t];
}

// ---- lanes of a warp that hand each other rows of 16 bytes; 32 threads
extern "C" __global__ void lanes(const float* in, float* out, int bug) {
  DYNAMIC_SHARED(shared);
  const int t = threadIdx.x, other = 31 - t;
  const uint32_t first = ptx::shared_address(shared), second = first + 512, full = second + 512;
  if (t == 0) ptx::mbarrier_init(full, 1);
  if (t == 0) ptx::mbarrier_init(full + 8, 32);
  if (t == 0) ptx::fence_mbarrier_init();
  const uint32_t row[4] = {__float_as_uint(in[t]), 1, 2, 3};
  uint32_t matrices[4];
  ptx::store_shared_v4(first + 16 * t, row);
  ptx::fence_proxy_async();
  if (bug != 1) __syncwarp();
  ptx::ldmatrix_x4(matrices, first + 16 * t);
  ptx::stmatrix_x4(second + 16 * t, matrices);
  if (bug != 2) __syncwarp();
  float sum = ptx::load_shared_f32(second + 16 * other);
  if (bug != 3) __syncwarp();
  ptx::store_shared_f32(second + 16 * t, 2.0f * in[t]);
  sum += __shfl_xor_sync(~0u, sum, 1);
  if (bug != 4) __syncwarp();
  sum += ptx::load_shared_f32(second + 16 * other) + ptx::load_shared_f32(first + 16 * other);
  if (bug != 5 && bug != 6) __syncwarp();
  if (bug != 6) ptx::stmatrix_x4(second + 16 * t, matrices);
  if (t == 0) {
    ptx::mbarrier_arrive_expect_tx(full, 128);
    ptx::bulk_load(first, in, 128, full);
  }
  if (bug != 7) __syncwarp();
  ptx::store_shared_f32(second + 16 * other, 3.0f * in[t]);
  ptx::mbarrier_wait(full, 0);
  sum += ptx::load_shared_f32(first + 4 * other) + ptx::load_shared_f32(second + 16 * other);
  for (int i = 0; i < 4; i++) {  // other ways to order lanes: a half-warp, an mbarrier of all lanes, a named barrier
    ptx::barrier_sync(1, 32);
    ptx::store_shared_f32(second + 16 * t, sum + i);
    if (bug != 8 && i < 2) __syncwarp(t < 16 ? 0xFFFFu : 0xFFFF0000u);
    if (i == 2) ptx::mbarrier_arrive(full + 8);
    if (i == 2) ptx::mbarrier_wait(full + 8, 0);
    if (i == 3) ptx::barrier_sync(1, 32);
    sum += ptx::load_shared_f32(second + 16 * (i < 2 ? t ^ 1 : other));
    if (bug != 9 && i == 1) __syncwarp(t < 16 ? 0xFFFFu : 0xFFFF0000u);
    if (i == 1) ptx::store_shared_f32(second + 16 * t, sum);
  }
  out[t] = sum;
}

// ---- cp.async through a ring of two stages; 32 threads, 8 rounds of 32 floats
extern "C" __global__ void copies(const float* in, float* out, int bug) {
  DYNAMIC_SHARED(shared);
  const int t = threadIdx.x;
  const uint32_t base = ptx::shared_address(shared);
  auto issue = [&](int i) {
    if (i < 8) ptx::cp_async<4>(base + i % 2 * 128 + 4 * t, in + 32 * i + t);
    if (bug != 1) ptx::cp_async_commit();
  };
  float sum = 0.0f;
  issue(0);
  issue(1);
  for (int i = 0; i < 8; i++) {
    if (bug == 2) ptx::cp_async_wait<2>();
    else if (bug != 3) ptx::cp_async_wait<1>();
    __syncthreads();
    sum += ptx::load_shared_f32(base + i % 2 * 128 + 4 * (31 - t));
    if (bug != 4) __syncthreads();
    issue(i + 2);
  }
  if (bug == 5) ptx::cp_async<4>(base + 4 * t, in + t);
  if (bug == 1 || bug == 2) ptx::cp_async_wait_all();
  out[t] = sum;
}

// ---- TMA-like bulk loads through two stages by a producer warp; 64 threads, 6 rounds of 32 floats
extern "C" __global__ void loads(const float* in, float* out, int bug) {
  DYNAMIC_SHARED(shared);
  const uint32_t base = ptx::shared_address(shared), full = base + 256, empty = full + 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rounds = 6;
  if (threadIdx.x == 0 && bug != 1) {
    for (int s = 0; s < 2; s++) {
      ptx::mbarrier_init(full + 8 * s, 1);
      ptx::mbarrier_init(empty + 8 * s, bug == 2 ? 2 : 1);
    }
    if (bug == 3) ptx::mbarrier_init(full, 1);
    if (bug != 4) ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (warp == 0) {
    for (int i = 0; i < rounds; i++) {
      const int s = i % 2, turn = i / 2;
      if (bug != 5) ptx::mbarrier_wait(empty + 8 * s, (turn & 1) ^ (bug == 6 ? 0 : 1));
      if (bug != 7) __syncwarp();
      if (lane) continue;
      ptx::mbarrier_arrive_expect_tx(full + 8 * s, bug == 8 ? 64 : 128);
      if (bug == 9 && i == 3) ptx::mbarrier_arrive(full + 8 * s);
      if (bug == 10 && i == 3) continue;
      ptx::bulk_load(base + 128 * s, in + 32 * i, 128, full + 8 * s);
    }
    if (bug == 11 && lane == 0) {
      ptx::mbarrier_wait(empty, (rounds / 2 - 1) & 1);
      ptx::bulk_load(base, in, 128, full);
    }
    return;
  }
  float sum = 0.0f;
  for (int i = 0; i < rounds; i++) {
    const int s = i % 2, turn = i / 2;
    if (bug != 12) ptx::mbarrier_wait(full + 8 * s, bug == 13 ? 0 : turn & 1);
    sum += ptx::load_shared_f32(base + 128 * s + 4 * lane);
    __syncwarp();
    if (bug == 14 && i == 2) ptx::store_shared(full + 8 * s, 7);
    if (lane == 0) ptx::mbarrier_arrive(empty + 8 * s);
  }
  out[lane] = sum;
}

// ---- bulk stores of what 64 threads wrote
extern "C" __global__ void stores(const float* in, float* out, int bug) {
  DYNAMIC_SHARED(shared);
  const int t = threadIdx.x;
  const uint32_t base = ptx::shared_address(shared);
  ptx::store_shared_f32(base + 4 * t, in[t]);
  if (bug == 1) {
  } else if (bug == 2) {
    if (t == 0) ptx::fence_proxy_async();
  } else {
    ptx::fence_proxy_async();
  }
  if (bug != 3) __syncthreads();
  if (t) return;
  ptx::bulk_store(out, base, bug == 4 ? 264 : bug == 5 ? 512 : 256);
  if (bug == 6) return;
  ptx::bulk_commit();
  if (bug == 7) ptx::store_shared_f32(base, 99.0f);
  if (bug != 8) ptx::bulk_wait_read<0>();
  if (bug == 9) out[0] = out[0] + 1.0f;  // before wait_group the store may not have happened
}

// ---- bulk copies of global memory that 64 threads wrote, and a bulk reduction over what they added
extern "C" __global__ void proxies(const float* in, float* out, int bug) {
  DYNAMIC_SHARED(shared);
  const int t = threadIdx.x;
  const uint32_t base = ptx::shared_address(shared), full = base + 1024, bits = __float_as_uint(in[t]);
  const uint32_t row[4] = {bits, bits, bits, bits}, zeros[4] = {0, 0, 0, 0};
  float* const sums = out + 256;
  if (t == 0) ptx::mbarrier_init(full, 1);
  if (t == 0) ptx::fence_mbarrier_init();
  ptx::store_global_v4(out + 4 * t, row);
  if (t < 16) ptx::store_global_v4(sums + 4 * t, zeros);
  if (bug != 1 && (bug != 2 || t == 0)) ptx::fence_proxy_async_global();
  __syncthreads();
  if (t == 0) {
    ptx::mbarrier_arrive_expect_tx(full, 1024);
    ptx::bulk_load(base, out, 1024, full);
  }
  ptx::mbarrier_wait(full, 0);
  ptx::reduce_add(sums + t, ptx::load_shared_f32(base + 16 * t));
  if (bug != 3) __syncthreads();
  if (t) return;
  if (bug != 4) ptx::fence_proxy_async_global();
  ptx::bulk_reduce_add_f32(sums, base, 256);
  ptx::bulk_commit();
  ptx::bulk_wait<0>();
}

// ---- wgmma: out (64 x 64) = a b with a 64 x 16 of f16 ones and b 16 x 64 of f16 ones, two products; 128 threads
extern "C" __global__ void products(const float* in, float* out, int bug) {
  DYNAMIC_SHARED(shared);
  const int t = threadIdx.x;
  const uint32_t base = ptx::shared_address(shared);
  const uint32_t ones[4] = {0x3C003C00u, 0x3C003C00u, 0x3C003C00u, 0x3C003C00u};
  for (int i = t; i < 256; i += 128) ptx::store_shared_v4(base + 16 * i, ones);
  if (bug != 1) ptx::fence_proxy_async();
  __syncthreads();
  const uint64_t a = ptx::matrix_descriptor<ptx::Swizzle::none, 128, 256>(base);
  const uint64_t b =
      ptx::matrix_descriptor<ptx::Swizzle::none, 128, 256>(base + 2048 + (bug == 2 && t >= 64 ? 128 : 0));
  if (bug == 16 && t / 32 == 2) ptx::setmaxnreg_dec<64>();
  float d[32];
  uint32_t registers[4] = {ones[0], ones[0], ones[0], ones[0]};
  for (int i = 0; i < 32; i++) d[i] = 0.0f;
  if (bug != 3) ptx::wgmma_fence();
  if (bug == 17) d[5] += 1.0f;
  if (bug == 18) registers[1] = 0;
  if (bug == 15 && t >= 96) return;
  ptx::wgmma_rs<64, Element::f16>(d, registers, b, true);
  ptx::wgmma_ss<64, Element::f16>(d, bug == 4 ? a + (1ull << 50) : a, bug == 5 && t % 32 == 9 ? b + 1 : b, true);
  ptx::wgmma_commit();
  if (bug == 7) d[3] *= 2.0f;
  if (bug == 8) registers[2] = 0;
  if (bug == 9 && t == 5) ptx::store_shared(base, 0);
  if (bug == 9) ptx::fence_proxy_async();
  if (bug == 10) {
    for (int i = 0; i < 32; i++) out[(t / 32 * 16 + i) * 64 + t % 32] = d[i];
  }
  ptx::wgmma_wait<0>();
  if (bug != 12) ptx::wgmma_fence();
  if (bug == 13) d[7] += 1.0f;
  ptx::wgmma_ss<64, Element::f16>(d, a, b, true);
  if (bug != 6) ptx::wgmma_commit();
  if (bug == 11) ptx::wgmma_wait<1>();
  if (bug == 14) {
    out[t] = d[0];
    return;
  }
  if (bug != 11) ptx::wgmma_wait<0>();
  ptx::pin_registers(d);
  ptx::pin_registers(registers);
  for (int i = 0; i < 32; i++)
    out[(t / 32 * 16 + t % 32 / 4 + 8 * (i / 2 % 2)) * 64 + i / 4 * 8 + t % 4 * 2 + i % 2] = d[i];
}

// ---- which block is reported
extern "C" __global__ void late_blocks(const float* in, float* out, int bug) {
  if (bug && blockIdx.x >= 5 && threadIdx.x == blockIdx.x) ptx::store_shared(4, 0);
  out[blockIdx.x * 64 + threadIdx.x] = in[threadIdx.x];
}

// ---- lane `bug` gives a row's address behind shared memory
extern "C" __global__ void rows(const float* in, float* out, int bug) {
  DYNAMIC_SHARED(shared);
  const int t = threadIdx.x;
  const uint32_t base = ptx::shared_address(shared);
  for (int i = 0; i < 4; i++) ptx::store_shared_f32(base + 16 * t + 4 * i, in[t]);
  __syncwarp();
  uint32_t r[4];
  ptx::ldmatrix_x4(r, base + 16 * t + (bug && t == bug ? 4096 : 0));
  out[t] = __uint_as_float(r[0]);
}

// ---- a thread overwrites what lies on its stack behind an array, and then faults
static __device__ __noinline__ void overwrite(const float* in, float* out, volatile int count) {
  volatile float here[4];
  for (int i = 0; i < count; i++) here[i] = in[1] * 1e30f;
  out[count > 4 ? 1 << 20 : threadIdx.x] = here[3];
}
extern "C" __global__ void smashed(const float* in, float* out, int bug) { overwrite(in, out, bug ? 20 : 4); }
