// Attention for sm_80: 4 warps of 16 queries each; Q, K and V come by cp.async in two stages, tiles of 128-byte rows
// whose 16-byte units are XORed with the row; products by ldmatrix and mma.
#include "attention.cuh"

using ptx::Element;

DEVICE uint32_t unit_address(uint32_t tile, int row, int unit) { return tile + row * 128 + ((unit ^ (row & 7)) << 4); }

// 128 threads copy rows [first, first + 64); rows past `rows` become zeros.
DEVICE void copy_tile(uint32_t tile, const uint16_t* source, int first, int rows) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int unit = threadIdx.x + 128 * i, row = unit / 8, column = unit % 8;
    const bool inside = first + row < rows;
    ptx::cp_async<16>(unit_address(tile, row, column), source + (inside ? (first + row) * HEAD_DIM : 0) + column * 8,
                      inside ? 16 : 0);
  }
}

extern "C" __global__ void __launch_bounds__(128) attention(const __grid_constant__ Params p) {
  DYNAMIC_SHARED(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * TILE, head = blockIdx.y;
  const uint32_t q_tile = ptx::shared_address(shared), k_tile = q_tile + TILE_BYTES,
                 v_tile = k_tile + STAGES * TILE_BYTES;
  const uint16_t* keys = p.k_rows + static_cast<int64_t>(head) * p.seqlen_k * HEAD_DIM;
  const uint16_t* values = p.v_rows + static_cast<int64_t>(head) * p.seqlen_k * HEAD_DIM;
  const int64_t row_of_head = static_cast<int64_t>(head) * p.seqlen_q;
  const int tiles = key_tiles(p, first), row = first + warp * 16 + lane / 4;
  auto load = [&](int n) {
    if (n < tiles) {
      copy_tile(k_tile + n % STAGES * TILE_BYTES, keys, n * TILE, p.seqlen_k);
      copy_tile(v_tile + n % STAGES * TILE_BYTES, values, n * TILE, p.seqlen_k);
    }
    ptx::cp_async_commit();
  };
  copy_tile(q_tile, p.q_rows + row_of_head * HEAD_DIM, first, p.seqlen_q);
  load(0);
  float o[32];
#pragma unroll
  for (int i = 0; i < 32; i++) o[i] = 0.0f;
  Softmax softmax;
  softmax.start();
  uint32_t q[4][4];
  // ldmatrix.x4: lanes 0-7 name the rows of the first 8x8 matrix, 8-15 those of the second ...
  const int a_row = lane % 16, a_unit = lane / 16, b_row = lane % 8 + lane / 16 * 8, b_unit = lane / 8 % 2;
  for (int n = 0; n < tiles; n++) {
    load(n + 1);
    if (BUG == 1) ptx::cp_async_wait<2>();
    else ptx::cp_async_wait<1>();
    if (BUG != 2) __syncthreads();
    const uint32_t k_stage = k_tile + n % STAGES * TILE_BYTES, v_stage = v_tile + n % STAGES * TILE_BYTES;
    if (n == 0)
      for (int k = 0; k < 4; k++) ptx::ldmatrix_x4(q[k], unit_address(q_tile, warp * 16 + a_row, 2 * k + a_unit));
    float s[32];
#pragma unroll
    for (int i = 0; i < 32; i++) s[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, unit_address(k_stage, j * 8 + b_row, 2 * k + b_unit));
        ptx::mma_m16n8k16<Element::f16>(reinterpret_cast<float (&)[4]>(s[4 * j]), q[k], b[0], b[1]);
        ptx::mma_m16n8k16<Element::f16>(reinterpret_cast<float (&)[4]>(s[4 * j + 4]), q[k], b[2], b[3]);
      }
    softmax.mask(p, s, row, n * TILE);
    softmax.update(s, o, p.scale * 1.44269504f);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const uint32_t a[4] = {pack(s[8 * k], s[8 * k + 1]), pack(s[8 * k + 2], s[8 * k + 3]),
                             pack(s[8 * k + 4], s[8 * k + 5]), pack(s[8 * k + 6], s[8 * k + 7])};
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        uint32_t b[4];
        ptx::ldmatrix_x4_trans(b, unit_address(v_stage, k * 16 + a_row, j + a_unit));
        ptx::mma_m16n8k16<Element::f16>(reinterpret_cast<float (&)[4]>(o[4 * j]), a, b[0], b[1]);
        ptx::mma_m16n8k16<Element::f16>(reinterpret_cast<float (&)[4]>(o[4 * j + 4]), a, b[2], b[3]);
      }
    }
    if (BUG != 3) __syncthreads();  // everybody is done with the stage that is loaded next
  }
  ptx::cp_async_wait_all();
  float lse[2];
  softmax.finish(o, lse, p.scale * 1.44269504f);
#pragma unroll
  for (int i = 0; i < 32; i += 2) {
    const int r = row + 8 * (i / 2 % 2);
    if (r < p.seqlen_q || BUG == 4)
      *reinterpret_cast<uint32_t*>(p.out_rows + (row_of_head + r) * HEAD_DIM + i / 4 * 8 + lane % 4 * 2) =
          pack(o[i], o[i + 1]);
  }
  for (int h = 0; h < 2; h++)
    if (lane % 4 == 0 && row + 8 * h < p.seqlen_q) p.lse[row_of_head + row + 8 * h] = lse[h];
}
