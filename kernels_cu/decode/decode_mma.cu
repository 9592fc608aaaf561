// Attention of new rows to cached keys on tensor cores with mma.sync, for every architecture from sm_80 on: decoding,
// speculative decoding, chunked prefill.
//
// A single new row is one row of a matrix product, and memory sets the time. So the query heads that share a KV head
// are packed with the new rows into tiles of BLOCK_M rows, keys and values are read once for all of them, and the keys
// of a sequence are split over blocks: each block takes one of the equal ranges of decode/plan.cuh (stream-K: Osama et
// al., arXiv 2301.03598; split keys: Dao et al., "Flash-Decoding", 2023). Within a block a ring of STAGES stages is
// filled by cp.async while an earlier stage is multiplied; its warps share rows and keys:
//
//      BLOCK_M = 16, WARPS = 4                          BLOCK_M = 64, WARPS = 4
//                 keys 0-15  16-31  32-47  48-63                    keys 0 .. 63
//      rows 0-15  warp 0    warp 1  warp 2  warp 3       rows 0-15   warp 0
//                                                        rows 16-31  warp 1
//      each has a softmax of its own over its keys       rows 32-47  warp 2
//      and they merge at the end                         rows 48-63  warp 3
//
//      pages or caches --cp.async--> K(n) V(n) | K(n+1) V(n+1) | ..  --ldmatrix--> S = Q K^T -> P -> O += P V
//                                    8-bit floats stay 8 bits in shared memory and are widened on the way out
//
// A piece that holds all keys of its item writes the output; others write a normalised O and its sum to a slot, and
// decode/decode_combine.cu merges these. Sums run in an order that depends only on the piece.
#include "decode/merge.cuh"
#include "decode/pieces.cuh"
#include "decode/rows.cuh"
#include "decode/source.cuh"
#include "mma/nonfinite.cuh"
#include "mma/softmax_tile.cuh"

constexpr int WARP_KEYS = BLOCK_N / KEY_WARPS;
constexpr int KEY_BLOCKS = WARP_KEYS / 8;
// Two steps of 8-bit keys at a time: the second may be past head_dim, and holds zeros in Q and K then.
constexpr int STEPS = (HEAD_DIM + 16 * KEY_STEPS - 1) / (16 * KEY_STEPS) * KEY_STEPS;
using QTile = Tile<BLOCK_M, 16 * STEPS, ELEMENT>;
using KTile = Tile<BLOCK_N, HEAD_DIM, KV_ELEMENT>;
// Columns of V that fill up the warps' shares are zeros, and are not stored.
struct PaddedValues : Tile<BLOCK_N, VALUE_COLUMNS, KV_ELEMENT> {
  static constexpr int USED = HEAD_DIM_V / CHUNK;
};
using VTile = Choice<LATENT, KTile, Choice<VALUE_COLUMNS == HEAD_DIM_V, Tile<BLOCK_N, HEAD_DIM_V, KV_ELEMENT>, PaddedValues>>;
constexpr int STAGE_BYTES = KTile::BYTES + (LATENT ? 0 : VTile::BYTES);
constexpr int RING_BYTES = STAGES * STAGE_BYTES;

static_assert(WARP_KEYS % 16 == 0, "a warp multiplies 16 keys at a time");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM_V % 8 == 0, "head dims must be multiples of 8");
static_assert(!NARROW || (HEAD_DIM % 16 == 0 && HEAD_DIM_V % 16 == 0), "rows of 8-bit floats are chunks of 16");
static_assert(STAGES >= 2, "one stage is multiplied while another is filled");
// The merge reuses the ring's place, and also Q's if rows are so wide that they would not fit beside it.
constexpr bool OVER_Q = VALUE_WARPS > 1;
constexpr int MERGE_BYTES = MergeArea::BYTES + (OVER_Q ? 0 : QTile::BYTES);
constexpr int LAYOUT_BYTES = QTile::BYTES + RING_BYTES > MERGE_BYTES ? QTile::BYTES + RING_BYTES : MERGE_BYTES;
static_assert(SHARED_BYTES == LAYOUT_BYTES, "the launch must provide what Q and the ring take, which the merge uses again");
static_assert(!LATENT || HEAD_DIM_V <= HEAD_DIM, "values are columns of keys");
static_assert(!LATENT || VALUE_WARPS == 1 || WARP_COLUMNS / KV_CHUNK % KTile::FACTOR == 0, "warps begin where chunks are spread alike");
static_assert(!LATENT || VALUE_COLUMNS == HEAD_DIM_V, "columns beyond values are keys");

using Scores = float[1][KEY_BLOCKS][4];
using Output = float[COLUMN_BLOCKS][1][4];

// The ring of key and value tiles. Tile n is the n-th of those that the entry's rows see.
struct Ring {
  CacheSource source;
  SeenKeys keys;
  KeyTiles tiles;
  int last;
  uint32_t base;
  Lookup<KTile, THREADS> k_next;  // of the next tile to be filled
  Lookup<VTile, THREADS> v_next;
  int nonfinite;  // whether any have been set to 0

  // The threads that copy rows of K also copy those of V, if both tiles are laid out alike.
  static constexpr bool ALIKE = LATENT || KTile::FACTOR == VTile::FACTOR;

  __device__ __forceinline__ KTile k_tile(int n) const {
    return {base + n % STAGES * STAGE_BYTES};
  }
  __device__ __forceinline__ VTile v_tile(int n) const { return {k_tile(n).base + (LATENT ? 0 : KTile::BYTES)}; }

  __device__ __forceinline__ void look_up(int n) {
    if (n >= last) return;
    const int first = tiles.at(n) * BLOCK_N;
    k_next.find(source.table, source.pages, keys, first);
    if constexpr (!ALIKE) v_next.find(source.table, source.pages, keys, first);
  }

  // Starts filling the tile's stage, whose rows have been looked up, and looks up those of the next. Past the last tile
  // the group is empty, which keeps the count of groups in step.
  __device__ __forceinline__ void fill(int n) {
    if (n < last) {
      k_next.copy(k_tile(n), source.k);
      if constexpr (LATENT) {
        // came with the keys
      } else if constexpr (ALIKE) {
        Lookup<VTile, THREADS> same;
#pragma unroll
        for (int i = 0; i < same.ROWS; i++) same.page[i] = k_next.page[i], same.row[i] = k_next.row[i];
        same.copy(v_tile(n), source.v);
      } else {
        v_next.copy(v_tile(n), source.v);
      }
    }
    ptx::cp_async_commit();
    look_up(n + 1);
  }

  // Waits for tile n and refills the stage of tile n - 1. In a tile with a mask, nonfinite values are set to 0.
  __device__ __forceinline__ void advance(int n, bool masked) {
    ptx::cp_async_wait<STAGES - 2>();
    if (masked && !LATENT) {
      nonfinite |= __syncthreads_or(clear_nonfinite<KV_ELEMENT, THREADS>(v_tile(n)));
    } else {
      __syncthreads();
    }
    fill(n + STAGES - 1);
  }
};

// Copies the entry's packed rows, and zeros past the last one and past head_dim.
DEVICE void copy_queries(const DecodeParams& params, const Entry& entry, int kv_head, const QTile& tile) {
  constexpr int GROUPS = QTile::CHUNKS / KEY_STEPS;  // of chunks that a thread copies together
  const Params& attention = params.attention;
  const int ratio = heads_a_group(params);
#pragma unroll 1
  for (int index = threadIdx.x; index < BLOCK_M * GROUPS; index += THREADS) {
    const int row = index / GROUPS, chunk = index % GROUPS * KEY_STEPS, packed = entry.packed_begin + row;
    const bool exists = packed < entry.packed_end;
    const int from = exists ? packed : entry.packed_begin, head = kv_head * ratio + from % ratio;
    const Q_ELEMENT* const elements = element_of<const Q_ELEMENT>(attention.q, attention.q_strides, entry.sequence,
                                                                  entry.lengths.q_start + from / ratio, head);
    uint32_t words[2][4] = {};
    constexpr int LOADS = NARROW_Q ? 1 : KEY_STEPS;  // of 16 bytes
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      if (!exists || (chunk + i) * 8 >= HEAD_DIM) continue;
      const Q_ELEMENT* const some = elements + (chunk + i) * 8;
      if (reinterpret_cast<uint64_t>(some) % 16 == 0) ptx::load_global_v4(words[i], some);
      else gather(words[i], some);
    }
    if constexpr (NARROW_Q) widen_query(words[0], words[1]);
    else if constexpr (NARROW) shuffled(words[0], words[1]);
#pragma unroll
    for (int i = 0; i < KEY_STEPS; i++) {
      const LaneAddress to = tile.lane(row, chunk + i);
      ptx::store_shared_v4(to.row + to.spread, words[i]);
    }
  }
}

DEVICE void multiply_keys(Scores& s, const LaneAddress& q, const LaneAddress& k) {
  if constexpr (NARROW) multiply_narrow_keys<QTile, KTile>(s, q, k);
  else multiply_rows<QTile, KTile, 2>(s, q, k);
}

DEVICE void multiply_values(Output& o, const Scores& p, const LaneAddress& v) {
  if constexpr (NARROW) multiply_narrow_values<VTile>(o, p, v);
  else multiply_weights<Products, VTile>(o, p, v);
}

// Calls visit(x, half, key) for every score that the lane holds. half: of its two rows.
template <class Visit>
DEVICE void for_each_score(Scores& s, int key_begin, Visit visit) {
#pragma unroll
  for (int block = 0; block < KEY_BLOCKS; block++) {
#pragma unroll
    for (int i = 0; i < 4; i++) visit(s[0][block][i], i / 2, key_begin + 8 * block + lane_column() + i % 2);
  }
}

// first_chunk: of the columns that the warp sums.
DEVICE void attend_tile(Output& o, SoftmaxRow (&softmax)[2], const Rows& rows, const LaneAddress& q, Ring& ring, int n,
                        bool masked, int first_chunk) {
  const int key_begin = ring.tiles.at(n) * BLOCK_N + rows.first_key;
  Scores s = {};
  const KTile k_tile = ring.k_tile(n);
  const VTile v_tile = ring.v_tile(n);
  multiply_keys(s, q, lane_of_b(k_tile, rows.first_key));
  if constexpr (!SCALE_ONLY) {
    for_each_score(s, key_begin, [&](float& x, int half, int key) {
      if (BIAS && masked && !rows.visible(half, key)) return;  // the bias may have no element for it
      x = rows.score[half](x, rows.row[half], key);
    });
  }
  if (masked) {
    for_each_score(s, key_begin, [&](float& x, int half, int key) { x = rows.visible(half, key) ? x : -INFINITY; });
  }
  // If values are keys, nonfinite ones are set to 0 only once all scores are computed.
  if (LATENT && masked) {
    __syncthreads();
    ring.nonfinite |= __syncthreads_or(clear_nonfinite<KV_ELEMENT, THREADS>(k_tile));
  }
  float correction[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    correction[half] = softmax_tile(s[0], softmax[half], rows.exponents, half, [](float x, int) { return x; });
  }
  rescale(o, 0, correction);
  LaneAddress values = Products::lane_of_values(v_tile, rows.first_key);
  if constexpr (VALUE_WARPS > 1) values.row += first_chunk * 16;
  multiply_values(o, s, values);
}

// Adds the nonfinite values of a tile, which the product left out, to the rows that see them. A lane adds to the sums
// that it has left in the area itself. first_row, key_warp: as in leave.
DEVICE void add_nonfinite(const MergeArea& area, const Rows& rows, const Ring& ring, int tile_begin, int first_row,
                        int key_warp, int first_column) {
#pragma unroll 1
  for (int i = 0; i < WARP_KEYS; i++) {
    const int key = tile_begin + rows.first_key + i;
    if (!ring.keys.has(key)) continue;
    const bool seen[2] = {rows.visible(0, key), rows.visible(1, key)};
    const KV_ELEMENT* const values = ring.source.value(key);
#pragma unroll 1
    for (int c = 0; c < 2 * COLUMN_BLOCKS; c++) {
      const int column = first_column + column_of(c / 2, c % 2);
      if (VALUE_COLUMNS != HEAD_DIM_V && column >= HEAD_DIM_V) continue;
      const float value = to_real(values[column]);
      if (value - value == 0.0f) continue;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (!seen[half]) continue;
        const uint32_t sum = area.at(first_row + 8 * half + lane_id() / 4, key_warp, column);
        ptx::store_shared_f32(sum, ptx::load_shared_f32(sum) + value);
      }
    }
  }
}

// Multiplies the piece's keys with the entry's rows. slot: as in write_rows.
DEVICE void attend(const DecodeParams& params, const Entry& entry, int kv_head, const Piece& piece, int slot,
                   uint32_t shared) {
  const QTile q_tile{shared};
  const SeenKeys keys = seen_keys(entry.mask, entry.row_begin, entry.row_end);
  const int warp = int(threadIdx.x) / 32 / VALUE_WARPS, first_row = warp / KEY_WARPS * 16, key_warp = warp % KEY_WARPS;
  const int first_column = int(threadIdx.x) / 32 % VALUE_WARPS * WARP_COLUMNS;
  const Rows rows = rows_of(params, entry, kv_head, first_row + lane_id() / 4, key_warp * WARP_KEYS);
  const CacheSource source = cache_source(params, entry.sequence, kv_head);
  Ring ring{source, keys, entry.tiles, piece.last, shared + QTile::BYTES, {}, {}, 0};

  Output o = {};
  SoftmaxRow softmax[2];
  start(softmax, rows.exponents);
  ring.look_up(piece.first);
#pragma unroll 1
  for (int n = 0; n < STAGES - 1; n++) ring.fill(piece.first + n);
  if (piece.first < piece.last) copy_queries(params, entry, kv_head, q_tile);
  const LaneAddress q_lane = lane_of_a(q_tile, first_row);

  const auto masked = [&](int n) { return !all_visible(entry, ring.tiles.at(n) * BLOCK_N); };
  // One loop for tiles with a mask and without: a second copy of its body would double a variant's compile time.
  for (int n = piece.first; n < piece.last; n++) {
    const bool mask = masked(n);
    ring.advance(n, mask);
    attend_tile(o, softmax, rows, q_lane, ring, n, mask, first_column / KV_CHUNK);
  }
  const MergeArea area{OVER_Q ? shared : ring.base};
  __syncthreads();  // all have left the ring
  leave(area, o, softmax, first_row, key_warp, first_column);
  for (int n = piece.first; ring.nonfinite && n < piece.last; n++) {
    if (masked(n)) add_nonfinite(area, rows, ring, ring.tiles.at(n) * BLOCK_N, first_row, key_warp, first_column);
  }
  __syncthreads();
  write_rows(params, entry, kv_head, slot, area);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_mma(const __grid_constant__ DecodeParams params) {
  DYNAMIC_SHARED(shared);
  for_each_piece(
      params,
      [&](const Entry& entry, int kv_head, const Piece& piece, int slot) {
        attend(params, entry, kv_head, piece, slot, ptx::shared_address(shared));
        __syncthreads();  // all have left the area that the next piece overwrites
      },
      [&](const Entry& entry, int kv_head, int64_t packed_end) {
        write_broken<THREADS>(params, entry, kv_head, packed_end);
      });
}
