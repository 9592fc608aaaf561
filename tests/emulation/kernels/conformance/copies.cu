// cp.async, ldmatrix, movmatrix, mma and wide memory accesses: the instructions of sm_80 kernels.
#include "ptx/copy_async.cuh"
#include "ptx/matrix.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

using ptx::Element;

// 32 threads copy `in` in units of BYTES through a ring of 3 stages; thread t's copy of round i takes valid[t] bytes.
template <int BYTES>
DEVICE void copy_ring(const unsigned char* in, const int* valid, unsigned char* out, int rounds) {
  DYNAMIC_SHARED(ring);
  constexpr int STAGES = 3, STAGE = 32 * BYTES;
  const int t = threadIdx.x;
  auto issue = [&](int i) {
    if (i < rounds)
      ptx::cp_async<BYTES>(ptx::shared_address(ring + i % STAGES * STAGE + t * BYTES), in + (i * 32 + t) * BYTES,
                           valid[t]);
    ptx::cp_async_commit();
  };
  for (int i = 0; i < STAGES - 1; i++) issue(i);
  for (int i = 0; i < rounds; i++) {
    ptx::cp_async_wait<STAGES - 2>();
    __syncthreads();
    issue(i + STAGES - 1);
    const unsigned char* stage = ring + i % STAGES * STAGE + (31 - t) * BYTES;  // another thread's copy
    for (int b = 0; b < BYTES; b++) out[(i * 32 + 31 - t) * BYTES + b] = stage[b];
  }
  ptx::cp_async_wait_all();
}
extern "C" __global__ void copy_4(const unsigned char* in, const int* valid, unsigned char* out, int rounds) {
  copy_ring<4>(in, valid, out, rounds);
}
extern "C" __global__ void copy_8(const unsigned char* in, const int* valid, unsigned char* out, int rounds) {
  copy_ring<8>(in, valid, out, rounds);
}
extern "C" __global__ void copy_16(const unsigned char* in, const int* valid, unsigned char* out, int rounds) {
  copy_ring<16>(in, valid, out, rounds);
}

// 32 threads copy 16 bytes each in no group, and read another thread's.
extern "C" __global__ void copy_ungrouped(const unsigned char* in, unsigned char* out) {
  DYNAMIC_SHARED(shared);
  const int t = threadIdx.x;
  ptx::cp_async<16>(ptx::shared_address(shared + 16 * t), in + 16 * t);
  ptx::cp_async_wait_all();
  __syncwarp();
  for (int b = 0; b < 16; b++) out[16 * t + b] = shared[16 * (31 - t) + b];
}

// in: 4 matrices of 8x8 16-bit elements. out: 15 words of each of 32 lanes, by word.
extern "C" __global__ void matrix_loads(const uint32_t* in, uint32_t* out) {
  DYNAMIC_SHARED(shared);
  const int lane = threadIdx.x;
  const uint32_t base = ptx::shared_address(shared);
  for (int i = lane; i < 128; i += 32) ptx::store_shared(base + 4 * i, in[i]);
  __syncwarp();
  uint32_t word[15], one[1], two[2], four[4];
  const uint32_t row = base + 16 * lane;
  ptx::ldmatrix_x1(one, row);
  word[0] = one[0];
  ptx::ldmatrix_x1_trans(one, row);
  word[1] = one[0];
  ptx::ldmatrix_x2(two, row);
  word[2] = two[0], word[3] = two[1];
  ptx::ldmatrix_x2_trans(two, row);
  word[4] = two[0], word[5] = two[1];
  ptx::ldmatrix_x4(four, row);
  for (int i = 0; i < 4; i++) word[6 + i] = four[i];
  word[14] = ptx::movmatrix_trans(four[3]);
  ptx::ldmatrix_x4_trans(four, row);
  for (int i = 0; i < 4; i++) word[10 + i] = four[i];
  for (int i = 0; i < 15; i++) out[i * 32 + lane] = word[i];
}

// a: [lane][4], b: [lane][2], c and d: [lane][4], as the fragments of one warp
struct Fragments {
  float d[4];
  uint32_t a[4], b[2];
};
DEVICE Fragments load_fragments(const uint32_t* a, const uint32_t* b, const float* c) {
  Fragments f;
  for (int i = 0; i < 4; i++) f.a[i] = a[threadIdx.x * 4 + i], f.d[i] = c[threadIdx.x * 4 + i];
  for (int i = 0; i < 2; i++) f.b[i] = b[threadIdx.x * 2 + i];
  return f;
}
DEVICE void store_fragment(const Fragments& f, float* d) {
  for (int i = 0; i < 4; i++) d[threadIdx.x * 4 + i] = f.d[i];
}
extern "C" __global__ void mma_f16(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
  Fragments f = load_fragments(a, b, c);
  ptx::mma_m16n8k16<Element::f16>(f.d, f.a, f.b[0], f.b[1]);
  store_fragment(f, d);
}
extern "C" __global__ void mma_bf16(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
  Fragments f = load_fragments(a, b, c);
  ptx::mma_m16n8k16<Element::bf16>(f.d, f.a, f.b[0], f.b[1]);
  store_fragment(f, d);
}
extern "C" __global__ void mma_tf32(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
  Fragments f = load_fragments(a, b, c);
  ptx::mma_m16n8k8_tf32(f.d, f.a, f.b[0], f.b[1]);
  store_fragment(f, d);
}
#if defined(GPU_ACTORS_EMULATED) || __CUDA_ARCH__ >= 890
extern "C" __global__ void mma_e4m3(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
  Fragments f = load_fragments(a, b, c);
  ptx::mma_m16n8k32<Element::e4m3>(f.d, f.a, f.b[0], f.b[1]);
  store_fragment(f, d);
}
extern "C" __global__ void mma_e5m2(const uint32_t* a, const uint32_t* b, const float* c, float* d) {
  Fragments f = load_fragments(a, b, c);
  ptx::mma_m16n8k32<Element::e5m2>(f.d, f.a, f.b[0], f.b[1]);
  store_fragment(f, d);
}
#endif

// Each of 32 threads moves 32 words through shared memory with every width, each time to another thread's place.
extern "C" __global__ void wide_accesses(const uint32_t* in, uint32_t* out) {
  DYNAMIC_SHARED(shared);
  const int t = threadIdx.x;
  const uint32_t base = ptx::shared_address(shared), mine = base + 64 * t, other = base + 64 * (31 - t);
  uint32_t four[4], two[2];
  ptx::load_global_v4(four, in + 16 * t);
  ptx::store_shared_v4(mine, four);
  two[0] = in[16 * t + 4], two[1] = in[16 * t + 5];
  ptx::store_shared_v2(mine + 16, two);
  ptx::store_shared(mine + 24, in[16 * t + 6]);
  ptx::store_shared_f32(mine + 28, __uint_as_float(in[16 * t + 7]));
  ptx::store_shared_u16(mine + 32, static_cast<uint16_t>(in[16 * t + 8]));
  ptx::store_shared_u16(mine + 34, static_cast<uint16_t>(in[16 * t + 8] >> 16));
  __syncwarp();
  ptx::load_shared_v4(four, other);
  ptx::store_global_v4(out + 12 * t, four);
  ptx::load_shared_v2(two, other + 16);
  out[12 * t + 4] = two[0], out[12 * t + 5] = two[1];
  out[12 * t + 6] = ptx::load_shared(other + 24);
  out[12 * t + 7] = __float_as_uint(ptx::load_shared_f32(other + 28));
  out[12 * t + 8] = ptx::load_shared(other + 32);
}
