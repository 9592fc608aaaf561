// Attention forward for wide heads, up to 512 columns, on tensor cores with mma.sync, for every architecture from sm_80
// on and every forward option of 16-bit inputs.
//
// Above 256 columns a warp has no registers for 16 rows of O. So two warps share them (FlashAttention-2 otherwise: Dao,
// arXiv 2307.08691, algorithm 1): each multiplies half of head_dim, the halves are added through shared memory, and
// then each has all weights of the rows and sums half of O's columns:
//
//            warp 0 of a pair                          warp 1 of a pair
//      S0 = Q K(n)^T over its columns            S1 = Q K(n)^T over the others
//                     \________ shared memory: S0, S1 _______/
//      S = S0 + S1, softmax, P                   S = S1 + S0: the same S and P, bit for bit
//      O += P V(n), its columns of V             O += P V(n), the others
//
//      barrier 1   K(n) is there, all have left V(n - 1): the next V starts      S0, S1
//      barrier 2   S0 and S1 are there, all have left K(n): the next K starts    S, softmax, P
//      barrier 3   V(n) is there                                                 O += P V(n)
//
// Tiles of K and of V pass through rings of STAGES stages each that take turns: with one stage, K(n + 1) is copied while
// V(n) is multiplied, and V(n) while K(n) is. Halves of columns are drawn in mma/shares.cuh, fragments in
// mma/fragments.cuh, quads and their rows in mma/softmax.cuh. Sums run in an order that depends on the block's own
// sequence alone, so a result has the same bits whatever the batch around it.
#include "mma/shares.cuh"
#include "mma/softmax_tile.cuh"
#include "mma/nonfinite.cuh"
#include "mma/store.cuh"
#include "common/block_tile.cuh"
#include "common/key_tiles.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int PAIR = 2;  // warps that share rows
constexpr int KEY_BLOCKS = BLOCK_N / 8;
// Rows of whole groups of chunks, so that tiles of every width are copied and divided alike.
template <int ROWS, int WIDTH, class Element>
struct WideTile : Tile<ROWS, (WIDTH + 63) / 64 * 64, Element> {
  static constexpr int USED = WIDTH / 8;
};
using QTile = WideTile<BLOCK_M, HEAD_DIM, ELEMENT>;
using KTile = WideTile<BLOCK_N, HEAD_DIM, KV_ELEMENT>;
using VTile = WideTile<BLOCK_N, HEAD_DIM_V, KV_ELEMENT>;
using KeyColumns = Columns<KTile, HEAD_DIM, PAIR>;
using ValueColumns = Columns<VTile, HEAD_DIM_V, PAIR>;
constexpr int COLUMN_BLOCKS = 2 * ValueColumns::PAIRS;

static_assert(BLOCK_M * PAIR == 16 * WARPS, "two warps share 16 rows");
static_assert(BLOCK_N % 16 == 0, "BLOCK_N must be a multiple of 16");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM_V % 8 == 0, "head dims must be multiples of 8");
static_assert(sizeof(ELEMENT) == 2 && sizeof(KV_ELEMENT) == 2, "inputs have 16 bits");
static_assert(!DESCALES, "descales are for 8-bit inputs");
constexpr int SCORE_BYTES = KEY_BLOCKS * 16;  // of a lane
constexpr int LAYOUT_BYTES = QTile::BYTES + STAGES * (KTile::BYTES + VTile::BYTES) + THREADS * SCORE_BYTES;
static_assert(SHARED_BYTES == LAYOUT_BYTES, "the launch must provide what Q, the stages of K and V, and the scores take");

using Scores = float[1][KEY_BLOCKS][4];
using Output = float[COLUMN_BLOCKS][1][4];
using Softmax = SoftmaxRow[2];  // of rows g and g + 8

// The rings of key and value tiles. Tile n is the n-th of those that the block's rows see.
struct Ring {
  RowSource<KV_ELEMENT> k, v;
  SeenKeys keys;
  Tiles tiles;
  uint32_t base;

  __device__ __forceinline__ KTile k_tile(int n) const { return {{base + n % STAGES * KTile::BYTES}}; }
  __device__ __forceinline__ VTile v_tile(int n) const {
    return {{base + STAGES * KTile::BYTES + n % STAGES * VTile::BYTES}};
  }

  // Whether a tile has keys that a row may see: those of a listed block may all lie past the sequence or the diagonal.
  __device__ __forceinline__ bool works(int n) const { return !BLOCK_MASK || tiles.at(n) * BLOCK_N < keys.end; }

  // Starts filling a stage with rows of tile n. Past the last tile the group is empty, which keeps the count of groups in
  // step.
  template <class Tile>
  __device__ __forceinline__ void fill(const Tile& tile, const RowSource<KV_ELEMENT>& source, int n) const {
    if (n < tiles.count() && works(n)) {
      const int first = tiles.at(n) * BLOCK_N;
      const auto seen = [&](int row) { return keys.has(first + row); };
      const RowSource<KV_ELEMENT> rows{source.rows + first * source.stride, source.stride, source.aligned};
      copy_rows<THREADS>(tile, rows, seen);
    }
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ void fill_keys(int n) const { fill(k_tile(n), k, n); }
  __device__ __forceinline__ void fill_values(int n) const { fill(v_tile(n), v, n); }

  // How many groups may have begun after the wanted one. They come in the order K(0), V(0), K(1) ..
  static constexpr int BEHIND_KEYS = 2 * STAGES - 2, BEHIND_VALUES = 2 * STAGES - 1;

  __device__ __forceinline__ void start() const {
    fill_keys(0);
#pragma unroll
    for (int n = 1; n < STAGES; n++) {
      fill_values(n - 1);
      fill_keys(n);
    }
  }
  // Barrier 1: waits for K(n), and refills the stage that V(n - 1) was in.
  __device__ __forceinline__ void land_keys(int n) const {
    ptx::cp_async_wait<BEHIND_KEYS>();
    __syncthreads();
    fill_values(n + STAGES - 1);
  }
  // Barrier 3: waits for V(n). In a tile with a mask, nonfinite values are set to 0; true if there was one.
  __device__ __forceinline__ bool land_values(int n, bool masked) const {
    ptx::cp_async_wait<BEHIND_VALUES>();
    if (masked) return __syncthreads_or(clear_nonfinite<KV_ELEMENT, THREADS>(v_tile(n)));
    __syncthreads();
    return false;
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
  __device__ __forceinline__ int row(int half) const { return at_most(end - 1, first + 8 * half + lane_id() / 4); }
};

// S of the warp's half of head_dim. Both warps multiply as many columns as the first one has; the extra columns of the
// second one are zeros. If it is unrolled further, ptxas loads so many fragments ahead that it spills.
DEVICE void multiply_half(Scores& s, const LaneAddress& q, const LaneAddress& k) {
#pragma unroll 2
  for (int pair = 0; pair < KeyColumns::PAIRS; pair++) {
    if (!KeyColumns::WHOLE && KeyColumns{0}.blocks(pair) <= 0) break;
    uint32_t a[4];
    ptx::ldmatrix_x4(a, q.at<QTile>(0, 2 * KeyColumns::offset(pair)));
#pragma unroll
    for (int keys = 0; keys < KEY_BLOCKS / 2; keys++) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, k.at<KTile>(16 * keys, 2 * KeyColumns::offset(pair)));
      Products::multiply(s[0][2 * keys], a, b[0], b[1]);
      Products::multiply(s[0][2 * keys + 1], a, b[2], b[3]);
    }
  }
}

// Where a lane of a warp leaves its sums for the same lane of the other warp: 16 bytes of neighbouring lanes lie together.
DEVICE uint32_t place_of_scores(uint32_t area, int warp) { return area + warp * 32 * SCORE_BYTES + lane_id() * 16; }

DEVICE void leave_scores(const Scores& s, uint32_t place) {
#pragma unroll
  for (int block = 0; block < KEY_BLOCKS; block++) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) words[i] = ptx::as_bits(s[0][block][i]);
    ptx::store_shared_v4(place + block * 512, words);
  }
}

DEVICE void add_scores(Scores& s, uint32_t place) {
#pragma unroll
  for (int block = 0; block < KEY_BLOCKS; block++) {
    uint32_t words[4];
    ptx::load_shared_v4(words, place + block * 512);
#pragma unroll
    for (int i = 0; i < 4; i++) s[0][block][i] += ptx::as_float(words[i]);
  }
}

// Turns scores into weights, and sets the factor of O.
template <bool MASKED>
DEVICE void weigh(Scores& s, Softmax& softmax, float (&correction)[2], const Rows& rows, int key_begin) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = rows.row(half);
    SeenColumns seen{};
    if constexpr (MASKED) seen = rows.mask.columns(row, key_begin);
    correction[half] = softmax_tile(s[0], softmax[half], rows.exponents, half, [&](float x, int column) {
      if (MASKED && !seen.has(column)) return -INFINITY;
      return SCALE_ONLY ? x : rows.score(x, row, key_begin + column);
    });
  }
}

// O += P V over the warp's columns. Here too both warps multiply as many as the first one has.
DEVICE void multiply_values(Output& o, const Scores& p, const LaneAddress& v) {
#pragma unroll
  for (int step = 0; step < BLOCK_N / Products::KEYS; step++) {
    uint32_t a[1][4];
    Products::weights(a[0], p[0], step);
#pragma unroll
    for (int pair = 0; pair < ValueColumns::PAIRS; pair++) {
      multiply_pair<Products, VTile>(o[2 * pair], o[2 * pair + 1], a, v, step, ValueColumns::offset(pair),
                                     (HEAD_DIM_V - ValueColumns{0}.column(pair)) / 8);
    }
  }
}

// Calls visit(block, column) for the first of the lane's two columns of each block of 8 that exists.
template <class Visit>
DEVICE void for_each_block(const ValueColumns& columns, Visit visit) {
#pragma unroll
  for (int block = 0; block < COLUMN_BLOCKS; block++) {
    if (!ValueColumns::WHOLE && columns.blocks(block / 2) <= block % 2) continue;
    visit(block, columns.column(block / 2) + block % 2 * 8 + lane_column());
  }
}

// Adds the nonfinite values of a tile, which the product left out, to the rows that see them.
DEVICE void add_nonfinite(Output& o, const Rows& rows, const Ring& ring, const ValueColumns& columns, int key_begin) {
  constexpr float HIDDEN = -1.0f;
#pragma unroll 1
  for (int key = key_begin; key < key_begin + BLOCK_N; key++) {
    if (!ring.keys.has(key)) continue;
    float weight[2];  // of a seen key it only matters as zero or positive
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const bool kept = !DROPOUT || rows.dropout.keeps(rows.row(half), key);
      weight[half] = !rows.mask.visible(rows.row(half), key) ? HIDDEN : kept ? 1.0f : 0.0f;
    }
    const KV_ELEMENT* const values = ring.v.rows + key * ring.v.stride;
    for_each_block(columns, [&](int block, int column) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float value = to_real(values[column + i]);
        if (value - value == 0.0f) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
          if (weight[half] != HIDDEN) o[block][0][2 * half + i] += value * weight[half];
        }
      }
    });
  }
}

DEVICE void store(const LaunchParams& params, const BlockTile& at, const Rows& rows, const Output& o,
                  const Softmax& softmax, const ValueColumns& columns) {
  float sink = -INFINITY;
  if constexpr (SINKS) sink = sink_logit(params, at.head);
  const float out_scale = DROPOUT ? float(params.dropout_scale) : 1.0f;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const RowResult result = finish(softmax[half], rows.exponents, sink);
    const int row = rows.first + 8 * half + lane_id() / 4;
    if (row >= rows.end) continue;
    const auto out = element_of<OUT_ELEMENT>(params.out, params.out_strides, at.sequence, at.q_start + row, at.head);
    const bool whole = stores_pairs(out);
    const float factor = result.factor * out_scale;
    for_each_block(columns, [&](int block, int column) {
      const float low = factor == 0.0f ? 0.0f : o[block][0][2 * half] * factor;
      const float high = factor == 0.0f ? 0.0f : o[block][0][2 * half + 1] * factor;
      store_pair(out + column, low, high, whole);
    });
    if (LSE && columns.warp == 0 && lane_id() % 4 == 0) {
      *element_of<float>(params.lse, params.lse_strides, at.sequence, at.q_start + row, at.head) = result.lse;
    }
    if (ROW_STATS && columns.warp == 0 && lane_id() % 4 == 0) {
      store_row_stats(params, at.sequence, at.q_start + row, at.head, result.largest, result.sum);
    }
  }
}

// Multiplies the rows from at.row_begin on, at most BLOCK_M of them, with all keys that they see.
DEVICE void attend(const LaunchParams& params, const BlockTile& at, uint32_t shared) {
  const int warp = int(threadIdx.x) / 32, first_row = warp / PAIR * 16;
  const int row_end = at_most(at.seqlen_q, at.row_begin + BLOCK_M);
  const KeyColumns key_columns{warp % PAIR};
  const ValueColumns value_columns{warp % PAIR};
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
  const QTile q_tile{{shared}};
  const Ring ring{row_source(k, k_strides.row), row_source(v, v_strides.row), keys, tiles, shared + QTile::BYTES};
  const uint32_t scores = ring.base + STAGES * (KTile::BYTES + VTile::BYTES);
  const LaneAddress q_lane = key_columns.lane(lane_of_a(q_tile, first_row));

  Output o = {};
  Softmax softmax;
  start(softmax, rows.exponents);

  const int count = tiles.count();
  if (count > 0) {  // the first group holds Q as well
    copy_rows<THREADS>(q_tile, row_source(q, q_strides.row), [&](int row) { return at.row_begin + row < row_end; });
  }
  ring.start();
  const auto unmasked = [&](int n) {
    const int key_begin = tiles.at(n) * BLOCK_N;
    return mask.all_visible(at.row_begin, row_end, key_begin, key_begin + BLOCK_N);
  };
  bool nonfinite = false;
#pragma unroll 1
  for (int n = 0; n < count; n++) {
    ring.land_keys(n);
    if (!ring.works(n)) {
      ring.fill_keys(n + STAGES);
      continue;
    }
    Scores s = {};
    multiply_half(s, q_lane, key_columns.lane(lane_of_b(ring.k_tile(n))));
    leave_scores(s, place_of_scores(scores, warp));
    __syncthreads();  // barrier 2
    ring.fill_keys(n + STAGES);
    add_scores(s, place_of_scores(scores, warp ^ 1));

    const bool masked = !unmasked(n);
    const int key_begin = tiles.at(n) * BLOCK_N;
    float correction[2];
    if (masked) weigh<true>(s, softmax, correction, rows, key_begin);
    else weigh<false>(s, softmax, correction, rows, key_begin);
    if constexpr (DROPOUT) drop(rows.dropout, s[0], rows.row(0), rows.row(1), key_begin);
    rescale(o, 0, correction);
    nonfinite |= ring.land_values(n, masked);
    multiply_values(o, s, value_columns.lane(Products::lane_of_values(ring.v_tile(n))));
  }
  for (int n = 0; nonfinite && n < count; n++) {
    if (!unmasked(n)) add_nonfinite(o, rows, ring, value_columns, tiles.at(n) * BLOCK_N);
  }
  store(params, at, rows, o, softmax, value_columns);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward_wide(const __grid_constant__ LaunchParams params) {
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
