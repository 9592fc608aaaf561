// Attention forward on CUDA cores: the plain kernel for every option, with which the fast ones are compared.
//
// FlashAttention's online softmax (Dao, arXiv 2307.08691, algorithm 1) with all products in float (double for double
// inputs). A block owns BLOCK_M query rows of one head of one sequence and walks over the key tiles that they see.
//
//                      S, P: BLOCK_N keys                    O: HEAD_DIM_V columns
//             lane  0 1 .. 15 0 1 .. 15          lane  0 1 .. 15 0 1 .. 15 0 1 ..
//   half-warp 0   | s s .. s  s s .. s  |            | o o .. o  o o .. o  o o .. |    a half-warp owns ROWS rows,
//   half-warp 1   | s s .. s  s s .. s  |  -- PV --> | o o .. o  o o .. o  o o .. |    and its 16 lanes share their
//      ...        |         ...         |            |            ...             |    maximum and sum
//
// For each tile: K to shared memory | S, softmax, P to shared memory | V to where K was | O += P V. A block's sums run
// in an order that depends on its own sequence alone, so a result has the same bits whatever the batch around it.
#include "common/params.cuh"
#include "common/mask.cuh"
#include "common/philox.cuh"
#include "common/block_tile.cuh"
#include "common/key_tiles.cuh"
#include "common/weighted_rows.cuh"
#include "common/score.cuh"

constexpr int LAYOUT_BYTES = ((BLOCK_M + BLOCK_N) * PITCH + BLOCK_M * BLOCK_N) * sizeof(Real);
static_assert(SHARED_BYTES == LAYOUT_BYTES,
              "the launch must provide what the tiles of Q, of K or V, and of P take");

// Multiplies the rows from at.row_begin on, at most BLOCK_M of them, with all keys that they see.
DEVICE void attend(const LaunchParams& params, const BlockTile& at, Real* q_tile) {
  const int lane = threadIdx.x % LANES, first_row = threadIdx.x / LANES * ROWS;
  Real* const kv_tile = q_tile + BLOCK_M * PITCH;
  Real* const p_rows = kv_tile + BLOCK_N * PITCH + first_row * BLOCK_N;
  const int row_end = at_most(at.seqlen_q, at.row_begin + BLOCK_M);

  const Strides &q_strides = params.q_strides, &k_strides = params.k_strides, &v_strides = params.v_strides;
  const auto q = element_of<const ELEMENT>(params.q, q_strides, at.sequence, at.q_start + at.row_begin, at.head);
  const auto k = element_of<const KV_ELEMENT>(params.k, k_strides, at.sequence, at.k_start, at.kv_head);
  const auto v = element_of<const KV_ELEMENT>(params.v, v_strides, at.sequence, at.k_start, at.kv_head);
  const Mask mask = make_mask(params, at.seqlen_q, at.seqlen_k, at.sequence);
  const Score<Real> score = make_score<Real>(params, at.sequence, at.head, at.kv_head, mask.diagonal);
  const Dropout dropout = make_dropout(params, at.sequence, at.head);

  // A sink is a first key without a value: it starts the maximum and the sum, which counts it once, and adds nothing to
  // O. A sink of -inf is none: the first score above it rescales the sum to 0.
  Real sink = -INFINITY;
  if constexpr (SINKS) sink = sink_logit(params, at.head);
  WeightedRows rows;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    rows.m[r] = sink;
    rows.l[r] = SINKS && lane == 0 ? 1 : 0;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) rows.o[r][c] = 0;
  }

  load_tile<BLOCK_M, HEAD_DIM>(q_tile, q, q_strides.row, row_end - at.row_begin);
  const Tiles tiles = key_tiles(params, mask, at.sequence, at.head, at.row_begin, row_end);
  for (int n = 0; n < tiles.count(); n++) {
    if (BLOCK_MASK && tiles.at(n) * BLOCK_N >= at.seqlen_k) continue;
    const int key_begin = tiles.at(n) * BLOCK_N, keys = at_most(at.seqlen_k - key_begin, BLOCK_N);
    const bool unmasked = mask.all_visible(at.row_begin, row_end, key_begin, key_begin + BLOCK_N);

    __syncthreads();  // all have read the previous V
    load_tile<BLOCK_N, HEAD_DIM>(kv_tile, k + key_begin * k_strides.row, k_strides.row, keys);
    __syncthreads();
    Real scores[ROWS][KEYS] = {};
    dot_products<HEAD_DIM>(scores, q_tile + first_row * PITCH, kv_tile + lane * PITCH);

#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const int row = at.row_begin + first_row + r;
      bool shown[KEYS];
      Real maximum = -INFINITY;
#pragma unroll
      for (int c = 0; c < KEYS; c++) {
        const int key = key_begin + c * LANES + lane;
        shown[c] = row < row_end && (unmasked || mask.visible(row, key));
        scores[r][c] = shown[c] ? score(scores[r][c], row, key) : -INFINITY;
        maximum = max_of(maximum, scores[r][c]);
      }
      const Real base = rows.raise_maximum(r, maximum);
#pragma unroll
      for (int c = 0; c < KEYS; c++) {
        const int column = c * LANES + lane;
        Real p = exp_of(scores[r][c] - base);
        rows.l[r] += p;
        if (DROPOUT && !dropout.keeps(row, key_begin + column)) p = 0;
        p_rows[r * BLOCK_N + column] = shown[c] ? p : HIDDEN;
      }
    }

    __syncthreads();  // all have read K and written P
    load_tile<BLOCK_N, HEAD_DIM_V>(kv_tile, v + key_begin * v_strides.row, v_strides.row, keys);
    __syncthreads();
    add_values(rows, p_rows, kv_tile, lane, keys);
  }

  Real out_scale = DROPOUT ? Real(params.dropout_scale) : Real(1);
  if constexpr (DESCALES) {
    out_scale *= descale(params.v_descale, params.v_descale_strides, at.sequence, at.kv_head);
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int row = at.row_begin + first_row + r;
    const Real l = sum_over_lanes(rows.l[r]);
    if (row >= row_end) continue;
    const auto out = element_of<OUT_ELEMENT>(params.out, params.out_strides, at.sequence, at.q_start + row, at.head);
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const int column = c * LANES + lane;
      const Real value = l == 0 ? Real(0) : rows.o[r][c] / l * out_scale;
      if (column < HEAD_DIM_V) out[column] = from_real(Rounded<OUT_ELEMENT>(), value);
    }
    if (LSE && lane == 0) {
      const auto lse = element_of<LseElement>(params.lse, params.lse_strides, at.sequence, at.q_start + row, at.head);
      *lse = l == 0 ? -INFINITY : LseElement(rows.m[r] + log_of(l));
    }
    if (ROW_STATS && lane == 0) {
      // A sink of -inf is still counted if no score followed.
      const Real sum = l == l && rows.m[r] == -INFINITY ? Real(0) : l;
      store_row_stats(params, at.sequence, at.q_start + row, at.head, float(rows.m[r]), float(sum));
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward_simple(const __grid_constant__ LaunchParams params) {
  DYNAMIC_SHARED(shared);
  const int row_tiles = (params.seqlen_q + BLOCK_M - 1) / BLOCK_M;
  BlockTile at = locate(params, row_tiles);
  // Once, unless a sequence is longer than the caller said: lengths on the device cannot be checked before.
  for (; at.row_begin < at.seqlen_q; at.row_begin += row_tiles * BLOCK_M) {
    attend(params, at, reinterpret_cast<Real*>(shared));
  }
}
