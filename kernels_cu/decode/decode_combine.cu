// Merges the partial results of items that are cut into pieces: softmax over their sums, in the order of the pieces, so
// that the bits do not depend on which block finished first.
//
//   blockIdx.x   without pinned splits: the boundary between two ranges, blockIdx.x and the next. The first boundary
//                inside an item merges it; the pieces are the end of one range, whole ranges, the beginning of one:
//
//                  range b-1           range b            range b+1
//                  |.....[ slot 2b-1 ]|[   slot 2b     ]|[ slot 2b+2 ].....|
//                                     ^ this boundary   ^ not this one
//
//                with pinned splits: an item, whose pieces are neighbouring slots
//   blockIdx.y   ROWS of its packed rows; a thread has four neighbouring elements of one
#include "decode/output.cuh"

LITTLE_ARITHMETIC

constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = 4;

// Pieces of an item and their slots.
struct Pieces {
  Position item;
  int count;
  int first, second;  // slot of piece 0 and of piece 1
  int step;           // between the slots of further pieces

  __device__ __forceinline__ int slot(int piece) const { return piece == 0 ? first : second + (piece - 1) * step; }
};

// How many ranges from `first` on begin inside the item. Each lane looks at one, so a warp waits once for 32 of them.
DEVICE int ranges_inside(const DecodeParams& params, const Position& item, int first) {
  const int lane = threadIdx.x % 32;
  for (int before = 0;; before += 32) {
    const int range = first + before + lane;
    const bool inside = range < params.ranges && position(params, range).same_item(item);
    const uint32_t outside = ~__ballot_sync(~0u, inside);
    if (outside != 0) return before + __ffs(int(outside)) - 1;
  }
}

DEVICE Pieces pieces_at_boundary(const DecodeParams& params, int boundary) {
  const Position at = position(params, boundary), before = position(params, boundary - 1);
  Pieces pieces{at, 0, 2 * boundary - 1, 2 * boundary, 2};
  if (at.tile == 0 || (before.same_item(at) && before.tile > 0)) return pieces;
  pieces.count = 2 + ranges_inside(params, at, boundary + 1);
  return pieces;
}

DEVICE Pieces pieces_of_item(const DecodeParams& params, int item) {
  const Position at{item / params.attention.heads_kv, item % params.attention.heads_kv, 0};
  const int first = item * params.splits, count = pieces_of(params, entry_of(params, at.entry).tiles.count());
  return {at, count > 1 ? count : 0, first, first + 1, 1};
}

DEVICE void merge(const DecodeParams& params, const Entry& entry, const Pieces& pieces, int row, int column) {
  const RowSum* const sums = partial_sums(params);
  RowSum all{-INFINITY, 0.0f};
  float values[4] = {};
  for (int piece = 0; piece < pieces.count; piece++) {
    all.top = max_of(all.top, sums[int64_t(pieces.slot(piece)) * BLOCK_M + row].top);
  }
  for (int piece = 0; piece < pieces.count; piece++) {
    const int64_t place = int64_t(pieces.slot(piece)) * BLOCK_M + row;
    const RowSum& own = sums[place];
    const float weight = own.sum == 0.0f ? 0.0f : own.sum * ptx::ex2((own.top - all.top) * LOG2_E);
    uint32_t words[4];
    ptx::load_global_v4(words, params.partial_out + place * HEAD_DIM_V + column);
    all.sum += weight;
#pragma unroll
    for (int i = 0; i < 4; i++) values[i] = add_weighted(values[i], weight, ptx::as_float(words[i]));
  }
  const OutputRow to = output_row(params, entry, pieces.item.head, entry.packed_begin + row);
  float sink = -INFINITY;
  if constexpr (SINKS) sink = sink_logit(params.attention, to.head);
  const RowResult result = finish_sum(all, sink);
#pragma unroll
  for (int i = 0; i < 4; i++) values[i] = result.factor == 0.0f ? 0.0f : values[i] * result.factor;
  store_neighbours(to.out + column, values);
  if (LSE && column == 0) *to.lse = result.lse;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_combine(const __grid_constant__ DecodeParams params) {
  constexpr int GROUPS = HEAD_DIM_V / 4;
  const Pieces pieces = params.splits == 0 ? pieces_at_boundary(params, int(blockIdx.x) + 1)
                                           : pieces_of_item(params, blockIdx.x);
  if (pieces.count == 0) return;
  const Entry entry = entry_of(params, pieces.item.entry);
  for (int index = threadIdx.x; index < ROWS * GROUPS; index += THREADS) {
    const int row = int(blockIdx.y) * ROWS + index / GROUPS;
    if (entry.packed_begin + row >= entry.packed_end) break;
    merge(params, entry, pieces, row, index % GROUPS * 4);
  }
}
