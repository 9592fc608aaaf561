// The end of a piece of work: what the warps of a block have summed becomes rows of the output or of a partial result.
//
//   shared memory, over the ring of keys and values, which has been read
//   +-----------------------+
//   | O of warp 0, 16 rows  |  rows 0..15, keys of key warp 0        a row's result is the sum over its key warps, each
//   | O of warp 1           |  rows 0..15, keys of key warp 1        weighted by 2^(its maximum - the largest), divided
//   |  ..                   |  ..                                    by the sum of weights
//   | maximum, sum          |  of each of these rows
//   +-----------------------+
//
// Rows of O are PITCH floats apart, so that eight rows of a store meet different banks.
#pragma once

#include "decode/fragments.cuh"
#include "decode/output.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int KV_CHUNK = 16 / sizeof(KV_ELEMENT);
constexpr int ROW_WARPS = BLOCK_M / 16;
constexpr int KEY_WARPS = WARPS / ROW_WARPS / VALUE_WARPS;
// Warps that share columns begin where the chunks of a tile's rows are spread alike.
constexpr int VALUE_COLUMNS = VALUE_WARPS == 1 ? HEAD_DIM_V
                                                : (HEAD_DIM_V + VALUE_WARPS * 8 * KV_CHUNK - 1) /
                                                      (VALUE_WARPS * 8 * KV_CHUNK) * (VALUE_WARPS * 8 * KV_CHUNK);
constexpr int WARP_COLUMNS = VALUE_COLUMNS / VALUE_WARPS;
constexpr int COLUMN_BLOCKS = WARP_COLUMNS / 8;
static_assert(ROW_WARPS * 16 == BLOCK_M && KEY_WARPS * ROW_WARPS * VALUE_WARPS == WARPS,
              "warps share rows, keys and columns evenly");

struct MergeArea {
  static constexpr int PITCH = VALUE_COLUMNS + 8;
  static constexpr int STATS = WARPS / VALUE_WARPS * 16 * PITCH * 4;
  static constexpr int BYTES = STATS + WARPS / VALUE_WARPS * 16 * 8;

  uint32_t base;

  // An element of a row of a warp's O; rows 16 and more belong to the next row warp.
  __device__ __forceinline__ uint32_t at(int row, int key_warp, int column) const {
    const int warp = row / 16 * KEY_WARPS + key_warp;
    return base + ((warp * 16 + row % 16) * PITCH + column) * 4;
  }
  __device__ __forceinline__ uint32_t stats(int row, int key_warp) const {
    return base + STATS + ((row / 16 * KEY_WARPS + key_warp) * 16 + row % 16) * 8;
  }
};

// Leaves a warp's sums in the area. first_row: of its 16. first_column: of those that it shares with others.
DEVICE void leave(const MergeArea& area, const float (&o)[COLUMN_BLOCKS][1][4], const SoftmaxRow (&softmax)[2],
                  int first_row, int key_warp, int first_column) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = first_row + 8 * half + lane_id() / 4;
#pragma unroll
    for (int c = 0; c < COLUMN_BLOCKS; c++) {
      if constexpr (NARROW) {  // four neighbours are in two blocks
        if (c % 2 == 1) continue;
        const float(&even)[4] = o[c][0];
        const float(&odd)[4] = o[c + 1][0];
        const uint32_t words[4] = {ptx::as_bits(even[2 * half]), ptx::as_bits(odd[2 * half]),
                                   ptx::as_bits(even[2 * half + 1]), ptx::as_bits(odd[2 * half + 1])};
        ptx::store_shared_v4(area.at(row, key_warp, first_column + column_of(c, 0)), words);
      } else {
        const uint32_t words[2] = {ptx::as_bits(o[c][0][2 * half]), ptx::as_bits(o[c][0][2 * half + 1])};
        ptx::store_shared_v2(area.at(row, key_warp, first_column + column_of(c, 0)), words);
      }
    }
    if (VALUE_WARPS > 1 && first_column != 0) continue;  // the others have the same sum
    const uint32_t words[2] = {ptx::as_bits(softmax[half].m), ptx::as_bits(sum_over_quad(softmax[half].l))};
    if (lane_id() % 4 == 0) ptx::store_shared_v2(area.stats(row, key_warp), words);
  }
}

// A row's sums, taken together: each key warp's weight, the maximum, and the sum of weights.
struct RowSums {
  float weight[KEY_WARPS];
  float m, l;
};

DEVICE RowSums gather_row(const MergeArea& area, const Exponents& exponents, int row) {
  RowSums sums{{}, exponents.lowest, 0.0f};
  float maxima[KEY_WARPS], l[KEY_WARPS];
#pragma unroll
  for (int w = 0; w < KEY_WARPS; w++) {
    uint32_t words[2];
    ptx::load_shared_v2(words, area.stats(row, w));
    maxima[w] = ptx::as_float(words[0]);
    l[w] = ptx::as_float(words[1]);
    sums.m = max_of(sums.m, maxima[w]);
  }
  const float factor = exponents.factor(sums.m), base = exponents.base(sums.m, factor);
#pragma unroll
  for (int w = 0; w < KEY_WARPS; w++) {
    sums.weight[w] = ptx::ex2(exponents.base(maxima[w], factor) - base);
    sums.l += sums.weight[w] * l[w];
  }
  return sums;
}

// Eight neighbours of a row, not yet divided by the sum of weights.
DEVICE void gather_values(float (&values)[8], const MergeArea& area, const RowSums& sums, int row, int column) {
#pragma unroll
  for (int i = 0; i < 8; i++) values[i] = 0.0f;
#pragma unroll
  for (int w = 0; w < KEY_WARPS; w++) {
#pragma unroll
    for (int part = 0; part < 2; part++) {
      uint32_t words[4];
      ptx::load_shared_v4(words, area.at(row, w, column + 4 * part));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float& value = values[4 * part + i];
        value = add_weighted(value, sums.weight[w], ptx::as_float(words[i]));
      }
    }
  }
}

// Writes the block's rows: to the output if slot < 0, else to that slot of the partial results.
DEVICE void write_rows(const DecodeParams& params, const Entry& entry, int kv_head, int slot, const MergeArea& area) {
  constexpr int GROUPS = HEAD_DIM_V / 8;
  const Params& attention = params.attention;
  float out_scale = 1.0f;
  if constexpr (DESCALES) {
    out_scale = descale(attention.v_descale, attention.v_descale_strides, entry.sequence, kv_head);
  }
  const Exponents exponents = exponents_of(attention);
#pragma unroll 1
  for (int index = threadIdx.x; index < BLOCK_M * GROUPS; index += THREADS) {
    const int row = index / GROUPS, column = index % GROUPS * 8, packed = entry.packed_begin + row;
    if (packed >= entry.packed_end) break;
    const RowSums sums = gather_row(area, exponents, row);
    float unit;
    const RowSum sum = row_sum(sums.m, sums.l, exponents, unit);
    float values[8];
    gather_values(values, area, sums, row, column);
    if (slot >= 0) {
      const float factor = sums.l == 0.0f ? 0.0f : ptx::rcp(sums.l) * out_scale;
      const int64_t place = int64_t(slot) * BLOCK_M + row;
      uint32_t words[8];
#pragma unroll
      for (int i = 0; i < 8; i++) words[i] = ptx::as_bits(sums.l == 0.0f ? 0.0f : values[i] * factor);
      float* const to = params.partial_out + place * HEAD_DIM_V + column;
      ptx::store_global_v4(to, {words[0], words[1], words[2], words[3]});
      ptx::store_global_v4(to + 4, {words[4], words[5], words[6], words[7]});
      if (column == 0) partial_sums(params)[place] = sum;
      continue;
    }
    const OutputRow to = output_row(params, entry, kv_head, packed);
    float sink = -INFINITY;
    if constexpr (SINKS) sink = sink_logit(attention, to.head);
    const RowResult result = finish_sum(sum, sink);
    const float factor = result.factor * unit * out_scale;
#pragma unroll
    for (int i = 0; i < 8; i++) values[i] = result.factor == 0.0f ? 0.0f : values[i] * factor;
    store_neighbours(to.out + column, values);
    if (LSE && column == 0) *to.lse = result.lse;
  }
}
