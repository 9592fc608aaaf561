// Attention of new rows to cached keys on CUDA cores: the plain kernel, for every dtype, head dim and stride that caches
// have, with all products in float (double for double inputs).
//
// A block owns one piece of an item of decode/plan.cuh: BLOCK_M packed rows of a KV head against some of the tiles of keys
// that they see. An item is cut into `splits` pieces of equal length, so that the grid depends on no length and the pieces
// of a sequence on no other sequence (split keys: Dao et al., "Flash-Decoding", 2023).
//
//   blockIdx.x   item * splits + piece
//
//   pages or caches --a warp a row--> K to shared memory | S, softmax, P | V to where K was | O += P V
//                                                          common/weighted_rows.cuh: a half-warp has ROWS packed rows
//
// A piece that holds all keys of its item writes the output. Others write a normalised O and its sum to slot blockIdx.x, and
// decode/decode_simple_combine.cu merges them.
#include "common/weighted_rows.cuh"
#include "decode/rows.cuh"
#include "decode/simple_output.cuh"
#include "decode/source.cuh"

constexpr int LAYOUT_BYTES = ((BLOCK_M + BLOCK_N) * PITCH + BLOCK_M * BLOCK_N) * sizeof(Real);
static_assert(SHARED_BYTES == LAYOUT_BYTES,
              "the launch must provide what the tiles of Q, of K or V, and of P take");
static_assert(!LATENT || HEAD_DIM_V <= HEAD_DIM, "values are columns of keys");

// A packed row of this half-warp.
struct PackedRow {
  Score<Real> score;
  uint64_t tree;  // new keys that the row sees
  int row;
  bool exists;

  __device__ __forceinline__ bool visible(const Entry& entry, int key) const {
    if (!entry.mask.visible(row, key)) return false;
    const int fresh = key - entry.first_new();
    return !TREE || fresh < 0 || (tree >> fresh & 1) != 0;
  }
};

DEVICE PackedRow packed_row(const DecodeParams& params, const Entry& entry, int kv_head, int packed) {
  const Params& attention = params.attention;
  const int ratio = heads_a_group(params);
  PackedRow row{};
  row.exists = packed < entry.packed_end;
  if (!row.exists) return row;
  row.row = packed / ratio;
  row.score = make_score<Real>(attention, entry.sequence, kv_head * ratio + packed % ratio, kv_head, entry.mask.diagonal);
#if POSITIONS
  row.score.positions = entry.mask.positions;
#endif
  if constexpr (TREE) {
    const int64_t place = entry.lengths.q_start + row.row;
    row.tree = *element_of<const uint64_t>(params.tree_mask, params.tree_mask_strides, entry.sequence, place, 0);
  }
  return row;
}

// Loads WIDTH columns of one row into shared memory, by a warp. Zeros if there is no row.
template <int WIDTH, class Element>
DEVICE void load_row(Real* to, const Element* from) {
  for (int column = threadIdx.x % 32; column < WIDTH; column += 32) {
    to[column] = from == nullptr ? Real(0) : round_operand<COMPUTE_BITS>(Real(to_real(from[column])));
  }
}

DEVICE void load_queries(Real* tile, const DecodeParams& params, const Entry& entry, int kv_head) {
  const int ratio = heads_a_group(params);
  for (int row = threadIdx.x / 32; row < BLOCK_M; row += WARPS) {
    const int packed = entry.packed_begin + row;
    const ELEMENT* from = nullptr;
    if (packed < entry.packed_end) {
      from = element_of<const ELEMENT>(params.attention.q, params.attention.q_strides, entry.sequence,
                                       entry.lengths.q_start + packed / ratio, kv_head * ratio + packed % ratio);
    }
    load_row<HEAD_DIM>(tile + row * PITCH, from);
  }
}

// Loads the rows of a tile of K or V. Rows that no query row sees are zeros and are not read.
template <int WIDTH>
DEVICE void load_cached(Real* tile, const CacheSource& source, const CacheRows& rows, const SeenKeys& keys, int first) {
  for (int row = threadIdx.x / 32; row < BLOCK_N; row += WARPS) {
    const int key = first + row;
    load_row<WIDTH>(tile + row * PITCH, keys.has(key) ? source.row(rows, key) : nullptr);
  }
}

// Multiplies tiles [begin, end) of those that the entry's rows see. whole: whether these are all.
DEVICE void attend(const DecodeParams& params, const Entry& entry, int kv_head, int begin, int end, bool whole,
                   Real* q_tile) {
  const int lane = threadIdx.x % LANES, first_row = threadIdx.x / LANES * ROWS;
  Real* const kv_tile = q_tile + BLOCK_M * PITCH;
  Real* const p_rows = kv_tile + BLOCK_N * PITCH + first_row * BLOCK_N;
  const CacheSource source = cache_source(params, entry.sequence, kv_head);
  const SeenKeys keys = seen_keys(entry.mask, entry.row_begin, entry.row_end);
  // For the whole warp, because its halves take part in each other's shuffles.
  const bool has_rows = entry.packed_begin + int(threadIdx.x) / 32 * (2 * ROWS) < entry.packed_end;
  PackedRow packed[ROWS];
  WeightedRows rows;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    packed[r] = packed_row(params, entry, kv_head, entry.packed_begin + first_row + r);
    rows.m[r] = -INFINITY;
    rows.l[r] = 0;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) rows.o[r][c] = 0;
  }

  load_queries(q_tile, params, entry, kv_head);
  for (int n = begin; n < end; n++) {
    const int key_begin = entry.tiles.at(n) * BLOCK_N;
    const bool unmasked = all_visible(entry, key_begin);

    __syncthreads();  // all have read the previous V
    load_cached<HEAD_DIM>(kv_tile, source, source.k, keys, key_begin);
    __syncthreads();
    if (has_rows) {
      Real scores[ROWS][KEYS] = {};
      dot_products<HEAD_DIM>(scores, q_tile + first_row * PITCH, kv_tile + lane * PITCH);
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
        bool shown[KEYS];
        Real maximum = -INFINITY;
#pragma unroll
        for (int c = 0; c < KEYS; c++) {
          const int key = key_begin + c * LANES + lane;
          shown[c] = packed[r].exists && (unmasked || packed[r].visible(entry, key));
          scores[r][c] = shown[c] ? packed[r].score(scores[r][c], packed[r].row, key) : -INFINITY;
          maximum = max_of(maximum, scores[r][c]);
        }
        const Real base = rows.raise_maximum(r, maximum);
#pragma unroll
        for (int c = 0; c < KEYS; c++) {
          const Real p = exp_of(scores[r][c] - base);
          rows.l[r] += p;
          p_rows[r * BLOCK_N + c * LANES + lane] = shown[c] ? p : HIDDEN;
        }
      }
    }

    __syncthreads();  // all have read K and written P
    load_cached<HEAD_DIM_V>(kv_tile, source, source.v, keys, key_begin);
    __syncthreads();
    if (has_rows) add_values(rows, p_rows, kv_tile, lane, BLOCK_N);
  }

  Real out_scale = 1;
  if constexpr (DESCALES) {
    const Params& attention = params.attention;
    out_scale = descale(attention.v_descale, attention.v_descale_strides, entry.sequence, kv_head);
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const Real l = sum_over_lanes(rows.l[r]);
    if (!packed[r].exists) continue;
    const int row = first_row + r;
    if (whole) {
      const OutputRow to = output_row(params, entry, kv_head, entry.packed_begin + row);
      const Finished<Real> result = finish_row(params, to.head, rows.m[r], l);
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        const int column = c * LANES + lane;
        const Real value = result.of(rows.o[r][c]) * out_scale;
        if (column < HEAD_DIM_V) to.out[column] = from_real(Rounded<OUT_ELEMENT>(), value);
      }
      if (LSE && lane == 0) *to.lse = float(result.lse);
      continue;
    }
    const int64_t place = int64_t(blockIdx.x) * BLOCK_M + row;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const int column = c * LANES + lane;
      const Real value = l == 0 ? Real(0) : rows.o[r][c] / l * out_scale;
      if (column < HEAD_DIM_V) partial_out<Real>(params)[place * HEAD_DIM_V + column] = value;
    }
    if (lane == 0) partial_sums<Real>(params)[place] = {rows.m[r], l};
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_simple(const __grid_constant__ DecodeParams params) {
  DYNAMIC_SHARED(shared);
  const int item = int(blockIdx.x) / params.splits, piece = int(blockIdx.x) % params.splits;
  const int kv_head = item % params.attention.heads_kv;
  const Entry entry = entry_of(params, item / params.attention.heads_kv);
  if (!entry.exists()) return;
  if (entry.lengths.broken) {
    const bool last = entry.packed_begin / BLOCK_M == params.row_tiles - 1;
    const int64_t all = int64_t(entry.lengths.rows) * heads_a_group(params);
    if (piece == 0) write_broken<THREADS>(params, entry, kv_head, last ? all : entry.packed_end);
    return;
  }
  const int count = entry.tiles.count(), pieces = pieces_of(params, count);
  if (piece >= pieces) return;
  attend(params, entry, kv_head, piece_begin(piece, pieces, count), piece_begin(piece + 1, pieces, count), pieces == 1,
         reinterpret_cast<Real*>(shared));
}
