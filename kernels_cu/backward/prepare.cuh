// What the first of the backward kernels computes for each row of queries. delta is D of line 4 in algorithm 2 of
// FlashAttention-2 (Dao, arXiv 2307.08691).
//
// A block takes BLOCK_M rows of one head of one sequence, eight lanes a row:
//
//   dout, out  row r  | chunk 0 | chunk 1 | .. | chunk 7 | chunk 8 ..     lane l of the row's eight takes chunks l, l + 8
//                          \         |            /
//                           delta = sum of dout * out, minus the LSE's own gradient
//   statistics of the slot:   lse, or lse * log2(e), BLOCK_M of them | delta, BLOCK_M of them
//   dsinks_parts of the block: - sum over rows of exp(sink - lse) * delta
//   dq_sums and dq_turns of the slot: 0, like all else that the later kernels add to or count in
//
// Rows past the sequence's end, and those that see no key, get an lse of +inf, so their weights 2^(score - lse) are 0
// without a mask. A NaN or an infinity in dout makes delta NaN, so that it reaches the gradients of all that its row
// sees, whatever the multiplying kernel does with it.
#pragma once

#include "backward/bounds.cuh"
#include "mma/tile.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

constexpr int PREPARE_THREADS = 128;
constexpr int LANES = 8;  // a row
constexpr int CHUNK = 16 / sizeof(ELEMENT);
constexpr int CHUNKS = HEAD_DIM_V / CHUNK;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr uint32_t ALL_LANES = 0xffffffffu;
static_assert(CHUNKS * CHUNK == HEAD_DIM_V, "rows are whole chunks of 16 bytes");

// Loads 16 bytes of a row, in one load if the row is aligned to as many.
DEVICE void load_chunk(float (&values)[CHUNK], const RowSource<ELEMENT>& source, int64_t row, int chunk) {
  const ELEMENT* const elements = source.rows + row * source.stride + chunk * CHUNK;
  uint32_t words[4];
  if (source.aligned) ptx::load_global_v4(words, elements);
  else gather(words, elements);
#pragma unroll
  for (int i = 0; i < CHUNK; i++) {
    if constexpr (CHUNK == 4) values[i] = ptx::as_float(words[i]);
    else values[i] = to_real(ELEMENT{uint16_t(words[i / 2] >> i % 2 * 16)});
  }
}

// A row's squared norm, the same in its eight lanes.
DEVICE float row_norm(const RowSource<ELEMENT>& source, int64_t row, int lane) {
  float sum = 0.0f;
  for (int chunk = lane; chunk < CHUNKS; chunk += LANES) {
    float a[CHUNK];
    load_chunk(a, source, row, chunk);
#pragma unroll
    for (int i = 0; i < CHUNK; i++) sum += a[i] * a[i];
  }
#pragma unroll
  for (int step = 1; step < LANES; step *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
  return sum;
}

// Raises the bound of the block's KV head by its values. The first head of its group reads them all, tile by tile.
DEVICE void raise_by_values(const BackwardParams& params, const RowPlace& at, int tiles, int lane) {
  const Params& forward = params.forward;
  const int group = forward.heads_q / forward.heads_kv, kv_head = at.head / group;
  if (at.head % group != 0) return;
  int64_t start = 0;
  int seqlen_k = forward.seqlen_k;
  if constexpr (VARLEN) {
    start = forward.cu_seqlens_k[at.sequence];
    seqlen_k = int(forward.cu_seqlens_k[at.sequence + 1] - start);
  }
  const auto values = element_of<const ELEMENT>(forward.v, forward.v_strides, at.sequence, start, kv_head);
  const RowSource<ELEMENT> rows = row_source(values, forward.v_strides.row);
  constexpr int AT_ONCE = PREPARE_THREADS / LANES;
  for (int first = at.tile * AT_ONCE; first < seqlen_k; first += tiles * AT_ONCE) {
    const int key = first + int(threadIdx.x) / LANES;
    const float norm = row_norm(rows, key < seqlen_k ? key : seqlen_k - 1, lane);
    if (lane == 0) raise_bound(ds_bounds_of(params, at.sequence, kv_head) + LARGEST_VALUE, sqrtf(norm));
  }
}

// The row's sum of dout * out, the same in its eight lanes.
DEVICE float row_delta(const RowSource<ELEMENT>& dout, const RowSource<ELEMENT>& out, int64_t row, int lane) {
  float sum = 0.0f, nonfinite = 0.0f;
  for (int chunk = lane; chunk < CHUNKS; chunk += LANES) {
    float a[CHUNK], b[CHUNK];
    load_chunk(a, dout, row, chunk);
    load_chunk(b, out, row, chunk);
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
      const float gradient = round_operand<COMPUTE_BITS>(a[i]);
      sum += gradient * b[i];
      nonfinite += gradient * 0.0f;  // NaN if the gradient is not finite
    }
  }
  sum += nonfinite;
#pragma unroll
  for (int step = 1; step < LANES; step *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
  return sum;
}

// Clears what the next kernel adds dQ to and counts turns in.
DEVICE void clear_slot(const BackwardParams& params, int64_t slot) {
  const uint32_t zeros[4] = {0, 0, 0, 0};
  float* const sums = params.dq_sums + slot * params.slot_floats;
  for (int n = 4 * int(threadIdx.x); n < params.slot_floats; n += 4 * PREPARE_THREADS) ptx::store_global_v4(sums + n, zeros);
  for (int n = int(threadIdx.x); n < params.slot_turns; n += PREPARE_THREADS) {
    params.dq_turns[slot * params.slot_turns + n] = 0;
  }
}

// Clears what belongs to no slot. The grid shares the work.
DEVICE void clear_others(const BackwardParams& params) {
  const int64_t first = int64_t(blockIdx.x) * PREPARE_THREADS + threadIdx.x, threads = int64_t(gridDim.x) * PREPARE_THREADS;
  for (int64_t n = first; n < params.dbias_size; n += threads) params.dbias_sums[n] = 0.0f;
  for (int64_t n = first; n < params.dbias_turns_size; n += threads) params.dbias_turns[n] = 0;
  if (first == 0 && params.tickets != nullptr) *params.tickets = 0;
}

DEVICE void prepare_rows(const BackwardParams& params) {
  const Params& forward = params.forward;
  const int tiles = row_tiles_of(forward.seqlen_q), lane = int(threadIdx.x) % LANES;
  const RowPlace at = locate_rows(forward, tiles);
  const auto dout = element_of<const ELEMENT>(params.dout, params.dout_strides, at.sequence, at.q_start, at.head);
  const auto out = element_of<const ELEMENT>(forward.out, forward.out_strides, at.sequence, at.q_start, at.head);
  const RowSource<ELEMENT> douts = row_source(dout, params.dout_strides.row);
  const RowSource<ELEMENT> outs = row_source(out, forward.out_strides.row);
  float sink = -INFINITY, dsink = 0.0f;
  if constexpr (SINKS) sink = sink_logit(forward, at.head);

  const int group = forward.heads_q / forward.heads_kv, kv_head = at.head / group;
  int32_t* bounds = nullptr;
  if constexpr (DS_BITS) {
    bounds = ds_bounds_of(params, at.sequence, kv_head);
    raise_by_values(params, at, tiles, lane);
  }
  clear_others(params);

  // More than one tile only if a sequence is longer than the caller said.
  for (int tile = at.tile; tile < row_tiles_of(at.seqlen_q); tile += tiles) {
    const int64_t slot = first_slot(forward, at.sequence, tile) + at.head;
    clear_slot(params, slot);
    float* const statistics = params.statistics + slot * (2 * BLOCK_M);
    for (int n = int(threadIdx.x) / LANES; n < BLOCK_M; n += PREPARE_THREADS / LANES) {
      const int row = tile * BLOCK_M + n;
      float lse = -INFINITY, delta = 0.0f;
      if (row < at.seqlen_q) {
        lse = *element_of<const float>(forward.lse, forward.lse_strides, at.sequence, at.q_start + row, at.head);
      }
      // Whole warps take part in a sum over lanes, so rows past the end repeat the last row.
      const float sum = row_delta(douts, outs, row < at.seqlen_q ? row : at.seqlen_q - 1, lane);
      float norm = 0.0f;
      if constexpr (DS_BITS) norm = row_norm(douts, row < at.seqlen_q ? row : at.seqlen_q - 1, lane);
      if (lse != -INFINITY) {
        delta = sum;
        if (params.dlse != nullptr) {
          delta -= *element_of<const float>(params.dlse, params.dlse_strides, at.sequence, at.q_start + row, at.head);
        }
        if (SINKS && lane == 0 && sink != -INFINITY) dsink -= exp_of(sink - lse) * delta;
      }
      if (DS_BITS && lane == 0 && lse != -INFINITY) {
        raise_bound(bounds + LARGEST_DOUT, sqrtf(norm));
        raise_bound(bounds + LARGEST_DELTA, fabsf(delta));
      }
      if (lane == 0) {
        statistics[n] = lse == -INFINITY ? INFINITY : NATURAL_LSE ? lse : lse * LOG2_E;
        statistics[BLOCK_M + n] = delta;
      }
    }
  }
  if constexpr (DS_BITS) settle_bounds(params, at.sequence, kv_head, group * tiles);
  if constexpr (SINKS) {
    __shared__ float parts[PREPARE_THREADS / 32];
#pragma unroll
    for (int step = LANES; step < 32; step *= 2) dsink += __shfl_xor_sync(ALL_LANES, dsink, step);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = dsink;
    __syncthreads();
    if (threadIdx.x == 0) {
      float sum = 0.0f;
      for (int warp = 0; warp < PREPARE_THREADS / 32; warp++) sum += parts[warp];
      params.dsinks_parts[(int64_t(at.head) * params.batch + at.sequence) * tiles + at.tile] = sum;
    }
  }
}
