// The last of the backward kernels on Hopper: sums in float to gradients in the inputs' types.
//
// A block takes one slot of dQ, in which backward_sm90 added for each consumer four values of each of its 128 threads,
// then the next four, and so on. It moves them to their places, times the softmax's scale.
//
//   dq_sums of a slot    consumer 0: | values 0..3 of threads 0, 1, 2 .. | values 4..7 of threads 0, 1, 2 .. | ..
//                        consumer 1: | ..
//   dq                   row 16w + g      | 2t, 2t + 1 | .. 8 further ..     thread 32w + 4g + t holds values 0 and 1
//                        row 16w + g + 8  | 2t, 2t + 1 | .. 8 further ..     of every four there, and 2 and 3 here
#include "backward/bounds.cuh"
#include "backward/finish.cuh"
#include "mma/store.cuh"

LITTLE_ARITHMETIC

constexpr int WARPGROUP = 128, CONSUMERS = 2, THREADS = CONSUMERS * WARPGROUP;
constexpr bool OWN_ROWS = BLOCK_M == 64 * CONSUMERS;
constexpr int CONSUMER_FLOATS = DQ_FLOATS / CONSUMERS, COLUMNS = CONSUMER_FLOATS / 64;
static_assert(OWN_ROWS || BLOCK_M == 64, "a consumer has 64 rows");

DEVICE void finish_rows(const BackwardParams& params, const RowPlace& at, int tile) {
  const int consumer = threadIdx.x / WARPGROUP, thread = threadIdx.x % WARPGROUP, lane = thread % 32;
  const int first_row = tile * BLOCK_M + (OWN_ROWS ? 64 * consumer : 0) + thread / 32 * 16 + lane / 4;
  const int first_column = (OWN_ROWS ? 0 : COLUMNS * consumer) + lane % 4 * 2;
  const int64_t slot = first_slot(params.forward, at.sequence, tile) + at.head;
  const float* const sums = params.dq_sums + slot * DQ_FLOATS + consumer * CONSUMER_FLOATS + thread * 4;
  const int kv_head = at.head / (params.forward.heads_q / params.forward.heads_kv);
  const float scale = float(params.forward.softmax_scale) * power_of_two(-ds_exponent(params, at.sequence, kv_head));
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = first_row + 8 * half;
    if (row >= at.seqlen_q) continue;
    const auto dq = element_of<OUT_ELEMENT>(params.dq, params.dq_strides, at.sequence, at.q_start + row, at.head);
    const bool whole = stores_pairs(dq);
#pragma unroll 8
    for (int block = 0; block < COLUMNS / 8; block++) {
      const int column = first_column + 8 * block;
      if (column >= HEAD_DIM) break;
      const float* const pair = sums + block * (4 * WARPGROUP) + 2 * half;
      store_pair(dq + column, pair[0] * scale, pair[1] * scale, whole);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) backward_finish_sm90(const __grid_constant__ BackwardParams params) {
  const int tiles = row_tiles_of(params.forward.seqlen_q);
  const RowPlace at = locate_rows(params.forward, tiles);
  // More than one tile only if a sequence is longer than the caller said.
  for (int tile = at.tile; tile < row_tiles_of(at.seqlen_q); tile += tiles) finish_rows(params, at, tile);
  if constexpr (SINKS) finish_sinks<THREADS>(params, tiles);
  finish_bias<THREADS>(params);
}
