// Attention forward on tensor cores with mma.sync, for every architecture from sm_80 on and every forward option.
//
// FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 1). A block owns BLOCK_M query rows of one head of one sequence;
// a warp owns ROW_BLOCKS times 16 of them and keeps their S, P and O in registers. Q stays in shared memory; tiles of
// BLOCK_N keys and values pass through a ring of STAGES stages, each filled by cp.async while an earlier one is
// multiplied:
//
//      shared memory            warp 0                         warp 1 ..
//    +---------------+
//    | Q             |--rows--> 16 x HEAD_DIM   (A)            the next 16 rows
//    +---------------+             x
//    | K(n)    V(n)  |--all---> K(n)            (B)            the same K(n)
//    | K(n+1)  V(n+1)|             = S 16 x BLOCK_N            its own S
//    |  .. STAGES    |             softmax, packed: P   (A)    its own P
//    +---------------+             x
//        ^ cp.async    --all---> V(n), transposed (B)          the same V(n)
//        | of tile n + STAGES - 1  = O 16 x HEAD_DIM_V         its own O
//
// One barrier a tile: after it tile n has landed for all, and all have left the stage that is refilled next.
// Fragments are drawn in mma/fragments.cuh, quads and their rows in mma/softmax.cuh, places in shared memory in
// mma/tile.cuh. Tiles that all rows see whole run in a loop without a mask. Sums run in an order that depends on the
// block's own sequence alone, so a result has the same bits whatever the batch around it.
#include "mma/products.cuh"
#include "mma/softmax_tile.cuh"
#include "mma/nonfinite.cuh"
#include "mma/store.cuh"
#include "common/block_tile.cuh"
#include "common/key_tiles.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int ROW_BLOCKS = BLOCK_M / (16 * WARPS);  // groups of 16 rows, a warp
constexpr int KEY_BLOCKS = BLOCK_N / 8;
constexpr int COLUMN_BLOCKS = HEAD_DIM_V / 8;
using QTile = Tile<BLOCK_M, HEAD_DIM, ELEMENT>;
using KTile = Tile<BLOCK_N, HEAD_DIM, KV_ELEMENT>;
using VTile = Tile<BLOCK_N, HEAD_DIM_V, KV_ELEMENT>;
constexpr bool ROUNDED = sizeof(ELEMENT) == 4;  // operands are rounded after they were copied

static_assert(ROW_BLOCKS * 16 * WARPS == BLOCK_M, "BLOCK_M must be a multiple of 16 rows a warp");
static_assert(BLOCK_N % 16 == 0, "BLOCK_N must be a multiple of 16");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM_V % 8 == 0, "head dims must be multiples of 8");
static_assert(STAGES >= 2, "one stage is multiplied while another is filled");
static_assert(!ROUNDED || COMPUTE_BITS <= 11, "tf32 has 11 significant bits");
static_assert(!DESCALES, "descales are for 8-bit inputs");
constexpr int LAYOUT_BYTES = QTile::BYTES + STAGES * (KTile::BYTES + VTile::BYTES);
static_assert(SHARED_BYTES == LAYOUT_BYTES, "the launch must provide what Q and the stages of K and V take");

using Scores = float[ROW_BLOCKS][KEY_BLOCKS][4];
using Output = float[COLUMN_BLOCKS][ROW_BLOCKS][4];
using Softmax = SoftmaxRow[ROW_BLOCKS][2];  // of rows g and g + 8 of each 16

// The ring of key and value tiles. Tile n is the n-th of those that the block's rows see.
struct Ring {
  RowSource<KV_ELEMENT> k, v;
  SeenKeys keys;
  Tiles tiles;
  uint32_t base;

  __device__ __forceinline__ KTile k_tile(int n) const {
    return {base + n % STAGES * (KTile::BYTES + VTile::BYTES)};
  }
  __device__ __forceinline__ VTile v_tile(int n) const { return {k_tile(n).base + KTile::BYTES}; }

  // Whether a tile has keys that a row may see: those of a listed block may all lie past the sequence or the diagonal.
  __device__ __forceinline__ bool works(int n) const { return !BLOCK_MASK || tiles.at(n) * BLOCK_N < keys.end; }

  // Starts filling the tile's stage. Past the last tile the group is empty, which keeps the count of groups in step.
  __device__ __forceinline__ void fill(int n) const {
    if (n < tiles.count() && works(n)) {
      const int first = tiles.at(n) * BLOCK_N;
      const auto seen = [&](int row) { return keys.has(first + row); };
      copy_rows<THREADS>(k_tile(n), RowSource<KV_ELEMENT>{k.rows + first * k.stride, k.stride, k.aligned}, seen);
      copy_rows<THREADS>(v_tile(n), RowSource<KV_ELEMENT>{v.rows + first * v.stride, v.stride, v.aligned}, seen);
    }
    ptx::cp_async_commit();
  }

  // Waits for tile n and refills the stage that tile n - 1 was in. In a tile with a mask, nonfinite values are set to
  // 0; true if there was one.
  template <bool MASKED>
  __device__ __forceinline__ bool advance(int n, const QTile& q) const {
    ptx::cp_async_wait<STAGES - 2>();
    if constexpr (ROUNDED) {
      if (n == 0) round_rows<COMPUTE_BITS, THREADS>(q);
      round_rows<COMPUTE_BITS, THREADS>(k_tile(n));
      round_rows<COMPUTE_BITS, THREADS>(v_tile(n));
    }
    bool nonfinite = false;
    if constexpr (MASKED) {
      nonfinite = __syncthreads_or(clear_nonfinite<KV_ELEMENT, THREADS>(v_tile(n)));
    } else {
      __syncthreads();
    }
    fill(n + STAGES - 1);
    return nonfinite;
  }
};

// What turns products into weights, and where this warp's rows are.
struct Rows {
  Score<float> score;
  Mask mask;
  Dropout dropout;
  Exponents exponents;
  int first, end;  // of the warp's rows, and of the sequence's rows in this block

  // Rows past the end are treated as the last row, so that they read no bias of their own; they are not stored.
  __device__ __forceinline__ int row(int block, int half) const {
    return at_most(end - 1, first + 16 * block + 8 * half + lane_id() / 4);
  }
};

template <bool MASKED>
DEVICE void attend_tile(Output& o, Softmax& softmax, const Rows& rows, const LaneAddress& q, const Ring& ring, int n) {
  const int key_begin = ring.tiles.at(n) * BLOCK_N;
  Scores s = {};
  multiply_rows<QTile, KTile, 2>(s, q, lane_of_b(ring.k_tile(n)));
#pragma unroll
  for (int b = 0; b < ROW_BLOCKS; b++) {
    float correction[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = rows.row(b, half);
      correction[half] = softmax_tile(s[b], softmax[b][half], rows.exponents, half, [&](float x, int column) {
        const int key = key_begin + column;
        if (MASKED && !rows.mask.visible(row, key)) return -INFINITY;
        return SCALE_ONLY ? x : rows.score(x, row, key);
      });
    }
    if constexpr (DROPOUT) drop(rows.dropout, s[b], rows.row(b, 0), rows.row(b, 1), key_begin);
    rescale(o, b, correction);
  }
  multiply_weights<Products, VTile>(o, s, Products::lane_of_values(ring.v_tile(n)));
}

// Adds the nonfinite values of a tile, which the product left out, to the rows that see them.
DEVICE void add_nonfinite(Output& o, const Rows& rows, const Ring& ring, int key_begin) {
  constexpr float HIDDEN = -1.0f;
#pragma unroll 1
  for (int key = key_begin; key < key_begin + BLOCK_N; key++) {
    if (!ring.keys.has(key)) continue;
    float weight[ROW_BLOCKS][2];  // of a seen key it only matters as zero or positive
#pragma unroll
    for (int b = 0; b < ROW_BLOCKS; b++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = rows.row(b, half);
        const bool kept = !DROPOUT || rows.dropout.keeps(row, key);
        weight[b][half] = !rows.mask.visible(row, key) ? HIDDEN : kept ? 1.0f : 0.0f;
      }
    }
    const KV_ELEMENT* const values = ring.v.rows + key * ring.v.stride + lane_column();
#pragma unroll
    for (int c = 0; c < 2 * COLUMN_BLOCKS; c++) {
      const float value = to_real(values[column_at(c)]);
      if (value - value == 0.0f) continue;
#pragma unroll
      for (int i = 0; i < 2 * ROW_BLOCKS; i++) {
        if (weight[i / 2][i % 2] != HIDDEN) o[c / 2][i / 2][i % 2 * 2 + c % 2] += value * weight[i / 2][i % 2];
      }
    }
  }
}

DEVICE void store(const LaunchParams& params, const BlockTile& at, const Rows& rows, const Output& o,
                  const Softmax& softmax) {
  float sink = -INFINITY;
  if constexpr (SINKS) sink = sink_logit(params, at.head);
  const float out_scale = DROPOUT ? float(params.dropout_scale) : 1.0f;
#pragma unroll
  for (int b = 0; b < ROW_BLOCKS; b++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const RowResult result = finish(softmax[b][half], rows.exponents, sink);
      const int row = rows.first + 16 * b + 8 * half + lane_id() / 4;
      if (row >= rows.end) continue;
      const auto out = element_of<OUT_ELEMENT>(params.out, params.out_strides, at.sequence, at.q_start + row, at.head);
      const bool whole = stores_pairs(out);
      const float factor = result.factor * out_scale;
#pragma unroll
      for (int c = 0; c < COLUMN_BLOCKS; c++) {
        const float low = factor == 0.0f ? 0.0f : o[c][b][2 * half] * factor;
        const float high = factor == 0.0f ? 0.0f : o[c][b][2 * half + 1] * factor;
        store_pair(out + 8 * c + lane_column(), low, high, whole);
      }
      if (LSE && lane_id() % 4 == 0) {
        *element_of<float>(params.lse, params.lse_strides, at.sequence, at.q_start + row, at.head) = result.lse;
      }
      if (ROW_STATS && lane_id() % 4 == 0) {
        store_row_stats(params, at.sequence, at.q_start + row, at.head, result.largest, result.sum);
      }
    }
  }
}

// Multiplies the rows from at.row_begin on, at most BLOCK_M of them, with all keys that they see.
DEVICE void attend(const LaunchParams& params, const BlockTile& at, uint32_t shared) {
  const int row_end = at_most(at.seqlen_q, at.row_begin + BLOCK_M), first_row = int(threadIdx.x) / 32 * 16 * ROW_BLOCKS;
  const Strides &q_strides = params.q_strides, &k_strides = params.k_strides, &v_strides = params.v_strides;
  const auto q = element_of<const ELEMENT>(params.q, q_strides, at.sequence, at.q_start + at.row_begin, at.head);
  const auto k = element_of<const KV_ELEMENT>(params.k, k_strides, at.sequence, at.k_start, at.kv_head);
  const auto v = element_of<const KV_ELEMENT>(params.v, v_strides, at.sequence, at.k_start, at.kv_head);
  const Mask mask = make_mask(params, at.seqlen_q, at.seqlen_k, at.sequence);
  const Score<float> score = make_score<float>(params, at.sequence, at.head, at.kv_head, mask.diagonal);
  const Dropout dropout = make_dropout(params, at.sequence, at.head);
  const Rows rows{score, mask, dropout, exponents_of(SCALE_ONLY ? score.scale : 1.0f), at.row_begin + first_row, row_end};

  const Tiles tiles = key_tiles(params, mask, at.sequence, at.head, at.row_begin, row_end);
  const SeenKeys keys = seen_keys(mask, at.row_begin, row_end);
  const QTile q_tile{shared};
  const Ring ring{row_source(k, k_strides.row), row_source(v, v_strides.row), keys, tiles, shared + QTile::BYTES};
  const LaneAddress q_lane = lane_of_a(q_tile, first_row);

  Output o = {};
  Softmax softmax;
#pragma unroll
  for (int b = 0; b < ROW_BLOCKS; b++) start(softmax[b], rows.exponents);

  const int count = tiles.count();
  if (count > 0) {  // the first group holds Q as well
    copy_rows<THREADS>(q_tile, row_source(q, q_strides.row), [&](int row) { return at.row_begin + row < row_end; });
  }
#pragma unroll
  for (int n = 0; n < STAGES - 1; n++) ring.fill(n);
  const auto unmasked = [&](int n) {
    const int key_begin = tiles.at(n) * BLOCK_N;
    return mask.all_visible(at.row_begin, row_end, key_begin, key_begin + BLOCK_N);
  };
  bool nonfinite = false;
  for (int n = 0; n < count;) {
    for (; n < count && !unmasked(n); n++) {
      nonfinite |= ring.advance<true>(n, q_tile);
      if (!ring.works(n)) continue;
      attend_tile<true>(o, softmax, rows, q_lane, ring, n);
    }
    for (; n < count && unmasked(n); n++) {
      ring.advance<false>(n, q_tile);
      attend_tile<false>(o, softmax, rows, q_lane, ring, n);
    }
  }
  for (int n = 0; nonfinite && n < count; n++) {
    if (!unmasked(n)) add_nonfinite(o, rows, ring, tiles.at(n) * BLOCK_N);
  }
  store(params, at, rows, o, softmax);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward_mma(const __grid_constant__ LaunchParams params) {
  DYNAMIC_SHARED(shared);
  const int row_tiles = (params.seqlen_q + BLOCK_M - 1) / BLOCK_M;
  BlockTile at = locate(params, row_tiles);
  // More than once only if a sequence is longer than the caller said, because lengths on the device cannot be checked
  // before.
  while (at.row_begin < at.seqlen_q) {
    attend(params, at, ptx::shared_address(shared));
    if (!VARLEN) break;
    at.row_begin += row_tiles * BLOCK_M;
    __syncthreads();  // all have left the tiles that the next rows overwrite
  }
}
