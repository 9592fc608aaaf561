// The last of the backward kernels: sums in float to gradients in the inputs' types.
//
// A block takes one slot of dQ. It moves the values that the lanes of backward_mma added side by side to their places,
// times the softmax's scale. The grid together converts dbias, and its first blocks add up the parts of dsinks:
//
//   dq_sums of a slot   | value 0 of lanes 0, 1, 2 .. | value 1 of lanes 0, 1, 2 .. | ..      REDUCE_WIDTH of each lane
//   dq of 16 rows       row g  | 2t, 2t + 1 | .. 8 further ..     lane 4g + t holds values 0 and 1 of every four there,
//                       g + 8  | 2t, 2t + 1 | .. 8 further ..     and values 2 and 3 here
//   dsinks of a head    the parts of all its blocks, in one order
#include "backward/bounds.cuh"
#include "backward/finish.cuh"
#include "mma/shares.cuh"
#include "mma/store.cuh"

LITTLE_ARITHMETIC

constexpr int THREADS = WARPS * 32;
constexpr int DQ_ROWS = WARP_TILE / 16, ROW_WARPS = BLOCK_M / WARP_TILE;
using QueryColumns = Columns<Tile<8, HEAD_DIM, ELEMENT>, HEAD_DIM, WARPS / ROW_WARPS>;
static_assert(DQ_FLOATS == 2 * QueryColumns::PAIRS * 4 * DQ_ROWS * THREADS, "the scratch of a slot is what a block adds");

DEVICE void finish_rows(const BackwardParams& params, const RowPlace& at, int tile) {
  const int warp = int(threadIdx.x) / 32, first_row = tile * BLOCK_M + warp % ROW_WARPS * WARP_TILE + lane_id() / 4;
  const QueryColumns columns{warp / ROW_WARPS};
  const int64_t slot = first_slot(params.forward, at.sequence, tile) + at.head;
  const float* const sums = params.dq_sums + slot * DQ_FLOATS + threadIdx.x * REDUCE_WIDTH;
  const int kv_head = at.head / (params.forward.heads_q / params.forward.heads_kv);
  const float scale = float(params.forward.softmax_scale) * power_of_two(-ds_exponent(params, at.sequence, kv_head));
#pragma unroll
  for (int half = 0; half < 2 * DQ_ROWS; half++) {
    const int row = first_row + 8 * half;
    if (row >= at.seqlen_q) continue;
    const auto dq = element_of<Gradient<SUMMED_Q>>(params.dq, params.dq_strides, at.sequence, at.q_start + row, at.head);
    const bool whole = stores_pairs(dq);
#pragma unroll
    for (int block = 0; block < 2 * QueryColumns::PAIRS; block++) {
      if (columns.blocks(block / 2) <= block % 2) continue;
      float pair[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int value = 4 * DQ_ROWS * block + 2 * half + i;
        pair[i] = sums[value / REDUCE_WIDTH * (REDUCE_WIDTH * THREADS) + value % REDUCE_WIDTH] * scale;
      }
      const int column = columns.column(block / 2) + block % 2 * 8 + lane_id() % 4 * 2;
      store_pair(dq + column, pair[0], pair[1], whole);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) backward_finish(const __grid_constant__ BackwardParams params) {
  const int tiles = row_tiles_of(params.forward.seqlen_q);
  const RowPlace at = locate_rows(params.forward, tiles);
  // More than one tile only if a sequence is longer than the caller said.
  for (int tile = at.tile; tile < row_tiles_of(at.seqlen_q); tile += tiles) finish_rows(params, at, tile);
  if constexpr (SINKS) finish_sinks<THREADS>(params, tiles);
  finish_bias<THREADS>(params);
}
