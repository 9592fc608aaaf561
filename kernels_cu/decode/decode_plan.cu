// Splits the work of a decode launch whose lengths lie on the device: decode/plan.cuh says what a plan is.
//
// One block. Its threads count the units of neighbouring entries, add up each other's counts, and then find, each for
// some of the ranges, the entry that a range's first unit falls into:
//
//   thread        0              1              2 ..
//   entries    | a b c d |    | e f g h |    | i j ..       units of each, summed from the thread's first on
//   sums       0 ---------- + all before ------- + ..       then units before each entry: params.sums
//   ranges     0, THREADS ..  1, ..             2, ..       position of unit range * all / ranges: params.plan
#include "decode/plan.cuh"

LITTLE_ARITHMETIC

constexpr int THREADS = 32 * WARPS;

// Moves a position to where the next piece begins.
DEVICE Position at_a_piece(const DecodeParams& params, const Position& at, int count) {
  const int pieces = pieces_of(params, count), piece = piece_from(at.tile, pieces, count);
  if (at.tile > 0 && piece == pieces) return next_item(params, at);
  return {at.entry, at.head, piece_begin(piece, pieces, count)};
}

// The position of a unit. sums: units before each of `entries` entries.
DEVICE Position find(const DecodeParams& params, const int64_t* sums, int entries, int64_t unit) {
  int low = 0, high = entries;  // the last entry that begins at or before the unit lies in [low, high)
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (sums[middle] <= unit) low = middle;
    else high = middle;
  }
  const Entry entry = entry_of(params, low);
  const int units = units_of(params, entry);
  const int rest = int(unit - sums[low]);
  const Position at{low, rest / units, at_least(0, rest % units - params.item_units)};
  return params.splits == 0 ? at : at_a_piece(params, at, entry.tiles.count());
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_plan(const __grid_constant__ DecodeParams params) {
  __shared__ int64_t counted[THREADS];
  const int thread = threadIdx.x, entries = params.batch * params.row_tiles;
  const int share = (entries + THREADS - 1) / THREADS;
  const int begin = at_most(entries, thread * share), end = at_most(entries, begin + share);
  int64_t sum = 0;
  for (int e = begin; e < end; e++) sum += int64_t(units_of(params, entry_of(params, e))) * params.attention.heads_kv;
  counted[thread] = sum;
  __syncthreads();
  int64_t before = 0, all = 0;
  for (int other = 0; other < THREADS; other++) {
    if (other < thread) before += counted[other];
    all += counted[other];
  }
  for (int e = begin; e < end; e++) {
    params.sums[e] = before;
    before += int64_t(units_of(params, entry_of(params, e))) * params.attention.heads_kv;
  }
  __syncthreads();
  int64_t ranges = all / params.min_units;
  ranges = ranges < 1 ? 1 : ranges > params.ranges ? params.ranges : ranges;
  for (int range = thread; range <= params.ranges; range += THREADS) {
    const bool past = range >= ranges || all == 0;
    const Position at = past ? Position{entries, 0, 0} : find(params, params.sums, entries, range * all / ranges);
    int32_t* const words = params.plan + 4 * range;
    words[0] = at.entry;
    words[1] = at.head;
    words[2] = at.tile;
    words[3] = 0;
  }
}
