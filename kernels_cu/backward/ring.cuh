// What one block of backward/backward_mma.cu works on, and how its operands reach shared memory.
#pragma once

#include "backward/bounds.cuh"
#include "backward/keys.cuh"
#include "mma/shares.cuh"
#include "mma/nonfinite.cuh"
#include "common/mask.cuh"
#include "common/score_mod.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int KEY_WARPS = WARPS < BLOCK_N / WARP_TILE ? WARPS : BLOCK_N / WARP_TILE;
constexpr int COLUMN_WARPS = WARPS / KEY_WARPS;
constexpr int KEY_ROWS = BLOCK_N / (16 * KEY_WARPS);  // groups of 16 keys, a warp
constexpr bool SPLIT = COLUMN_WARPS > 1 && BLOCK_M % (16 * COLUMN_WARPS) == 0;
constexpr int QUERIES = SPLIT ? BLOCK_M / COLUMN_WARPS : BLOCK_M;  // whose scores a warp computes
constexpr bool ROUNDED = sizeof(ELEMENT) == 4;  // operands are rounded after they were copied
constexpr bool HIDES = CAUSAL || WINDOW;        // some pairs of rows and keys of a sequence

using KTile = Tile<BLOCK_N, HEAD_DIM, ELEMENT>;
using VTile = Tile<BLOCK_N, HEAD_DIM_V, ELEMENT>;
using QTile = Tile<BLOCK_M, HEAD_DIM, ELEMENT>;
using DoTile = Tile<BLOCK_M, HEAD_DIM_V, ELEMENT>;
using ScoreTile = Tile<BLOCK_N, BLOCK_M, ELEMENT>;
constexpr int STATISTICS_BYTES = 2 * BLOCK_M * 4;
constexpr int STAGE_BYTES = QTile::BYTES + DoTile::BYTES + STATISTICS_BYTES;

static_assert(KEY_WARPS * COLUMN_WARPS == WARPS, "every warp has its keys and columns");
static_assert(KEY_ROWS * 16 * KEY_WARPS == BLOCK_N, "BLOCK_N must be a multiple of 16 keys a warp");
static_assert(WARPS % (BLOCK_M / WARP_TILE) == 0 && BLOCK_M % WARP_TILE == 0, "rows of dQ have the same number of warps each");
static_assert(!ROUNDED || COMPUTE_BITS <= 11, "tf32 has 11 significant bits");
static_assert(!DESCALES, "descales are for 8-bit inputs");
constexpr int EXPONENT_BYTES = DS_BITS ? 16 : 0;  // of which an int is used
constexpr int LAYOUT_BYTES =
    KTile::BYTES + VTile::BYTES + STAGES * STAGE_BYTES + (SPLIT ? 2 : 1) * ScoreTile::BYTES + EXPONENT_BYTES;
static_assert(SHARED_BYTES == LAYOUT_BYTES, "the launch must provide what K, V, the stages of Q and dO, and the scores take");

// Keeps log2 of the factor of dS in shared memory, because in a register it makes some variants spill. Every thread
// writes it, so that none has to wait for it.
DEVICE void keep_ds_exponent(uint32_t shared, int exponent) {
  ptx::store_shared(shared + LAYOUT_BYTES - EXPONENT_BYTES, uint32_t(exponent));
}

static_assert(STAGES <= 2, "a step fills its own stage or that of the next");

// `Step`: the number of the step in the ring, and which query head and tile of queries it takes.
#if BLOCK_MASK
static_assert(BLOCK_MASK_ROWS % BLOCK_M == 0 && BLOCK_MASK_KEYS % BLOCK_N == 0, "blocks of a mask are whole tiles");
using Tiles = ListedTiles<BLOCK_MASK_ROWS / BLOCK_M>;
#endif

struct Step {
  int number, head, tile;
};

// One tile of keys against every query tile that sees one of them, head by head: steps 0, 1, .. of the ring.
struct Ring {
  const BackwardParams& params;
  const KeyPlace& at;
  SeenRows rows;
  int heads;         // query heads of the KV head
  int first_tile;    // of queries
  int tiles, count;  // query tiles of a head, and steps
  uint32_t shared;
#if BLOCK_MASK
  const ScoreParams& scores;
  int key_begin;
#endif

  __device__ __forceinline__ KTile k_tile() const { return {shared}; }
  __device__ __forceinline__ VTile v_tile() const { return {shared + KTile::BYTES}; }
  __device__ __forceinline__ QTile q_tile(const Step& now) const {
    return {shared + KTile::BYTES + VTile::BYTES + (now.number & (STAGES - 1)) * STAGE_BYTES};
  }
  __device__ __forceinline__ DoTile do_tile(const Step& now) const { return {q_tile(now).base + QTile::BYTES}; }
  // BLOCK_M times lse and then BLOCK_M times delta.
  __device__ __forceinline__ uint32_t statistics(const Step& now) const { return do_tile(now).base + DoTile::BYTES; }
  __device__ __forceinline__ ScoreTile ds_tile() const {
    return {shared + KTile::BYTES + VTile::BYTES + STAGES * STAGE_BYTES};
  }
  __device__ __forceinline__ ScoreTile p_tile() const { return {ds_tile().base + ScoreTile::BYTES}; }

  // log2 of the factor of dS.
  __device__ __forceinline__ int ds_exponent() const {
    return DS_BITS ? int(ptx::load_shared(shared + LAYOUT_BYTES - EXPONENT_BYTES)) : 0;
  }

  // `before_first`: the step that only fills, before the first one if there are two stages.
#if BLOCK_MASK
  __device__ __forceinline__ Tiles listed(int head) const {
    if (VARLEN && key_begin >= params.forward.seqlen_k) return {};  // lists end with the caller's seqlen_k
    return {bind_block_list(scores, at.sequence, head, key_begin / BLOCK_MASK_KEYS)};
  }
#if DETERMINISTIC
  // How many key tiles that the step's rows list come before this one. Only the result of warp 0 is right.
  __device__ __forceinline__ int turn(const Step& now) const {
    const BlockList keys = bind_key_list(scores, at.sequence, now.head, now.tile * BLOCK_M / BLOCK_MASK_ROWS);
    const int block = key_begin / BLOCK_MASK_KEYS;
    int before = 0;
    if (threadIdx.x < 32) {
#pragma unroll 1
      for (int n = lane_id(); n < keys.count(); n += 32) before += keys.at(n) < block;
#pragma unroll
      for (int apart = 16; apart > 0; apart /= 2) before += __shfl_xor_sync(~0u, before, apart);
    }
    return before * (BLOCK_MASK_KEYS / BLOCK_N) + key_begin % BLOCK_MASK_KEYS / BLOCK_N;
  }
#endif
  __device__ __forceinline__ Step before_first() const {
    const Step none{-1, 0, 0};
    return STAGES > 1 ? none : next(none);
  }
  __device__ __forceinline__ Step next(const Step& now) const {
    int place = now.number + 1, head = at.kv_head * heads;
    if (place >= count) return {place, 0, 0};
    for (;; head++) {
      const Tiles tiles = listed(head);
      if (place < tiles.count()) return {now.number + 1, head, tiles.at(place)};
      place -= tiles.count();
    }
  }
#else
  __device__ __forceinline__ Step before_first() const {
    return {1 - STAGES, at.kv_head * heads, first_tile - (STAGES > 1)};
  }
  __device__ __forceinline__ Step next(const Step& now) const {
    const bool whole = now.tile + 1 == first_tile + tiles;
    return {now.number + 1, now.head + whole, whole ? first_tile : now.tile + 1};
  }
#endif
  // Whether the step has queries: a list's last block may lie past the sequence's end.
  __device__ __forceinline__ bool works(const Step& now) const {
    return now.number >= 0 && (!BLOCK_MASK || now.tile * BLOCK_M < at.seqlen_q);
  }
  __device__ __forceinline__ int64_t slot(const Step& now) const {
    return first_slot(params.forward, at.sequence, now.tile) + now.head;
  }

  __device__ __forceinline__ RowSource<ELEMENT> source(const void* operand, const Strides& strides, const Step& now) const {
    const int64_t row = at.q_start + now.tile * BLOCK_M;
    return row_source(element_of<const ELEMENT>(operand, strides, at.sequence, row, now.head), strides.row);
  }
  __device__ __forceinline__ RowSource<ELEMENT> dout(const Step& now) const { return source(params.dout, params.dout_strides, now); }

  // Starts filling the step's stage. Past the last step the group is empty, which keeps the count of groups in step.
  // Rows that see none of the keys are not read.
  __device__ __forceinline__ void fill(const Step& now) const {
    if (now.number < count && (!BLOCK_MASK || now.tile * BLOCK_M < at.seqlen_q)) {
      const int first = now.tile * BLOCK_M;
      const auto seen = [&](int row) { return rows.has(first + row); };
      copy_rows<THREADS>(q_tile(now), source(params.forward.q, params.forward.q_strides, now), seen);
      copy_rows<THREADS>(do_tile(now), dout(now), seen);
      for (int chunk = threadIdx.x; chunk < STATISTICS_BYTES / 16; chunk += THREADS) {
        ptx::cp_async<16>(statistics(now) + chunk * 16, params.statistics + slot(now) * (2 * BLOCK_M) + chunk * 4);
      }
    }
    ptx::cp_async_commit();
  }

  // Copies the keys and values that some row sees into the first group.
  __device__ __forceinline__ void fill_keys(const Mask& mask, int key_begin) const {
    const Params& p = params.forward;
    const SeenKeys seen_by_rows = seen_keys(mask, 0, at.seqlen_q);
    const int64_t row = at.k_start + key_begin;
    const auto seen = [&](int key) { return seen_by_rows.has(key_begin + key); };
    const auto k = element_of<const ELEMENT>(p.k, p.k_strides, at.sequence, row, at.kv_head);
    const auto v = element_of<const ELEMENT>(p.v, p.v_strides, at.sequence, row, at.kv_head);
    copy_rows<THREADS>(k_tile(), row_source(k, p.k_strides.row), seen);
    copy_rows<THREADS>(v_tile(), row_source(v, p.v_strides.row), seen);
  }

  // Waits for the step's stage and refills that of the previous step; steps before the first only fill. In a tile with
  // a mask, nonfinite values of Q and dO are set to 0, because they are multiplied by the zeros of hidden pairs.
  // Returns whether dO had one.
  __device__ __forceinline__ bool advance(const Step& now, bool masked) const {
    if constexpr (STAGES == 1) {
      if (now.number > 0) __syncthreads();  // all have left the stage
      fill(now);
    }
    const bool nonfinite = now.number >= 0 && receive(now, masked);
    if constexpr (STAGES > 1) fill(next(now));
    return nonfinite;
  }

  __device__ __forceinline__ bool receive(const Step& now, bool masked) const {
    ptx::cp_async_wait<STAGES == 1 ? 0 : STAGES - 2>();
    if constexpr (ROUNDED) {
      round_rows<COMPUTE_BITS, THREADS>(q_tile(now));
      round_rows<COMPUTE_BITS, THREADS>(do_tile(now));
    }
    if (HIDES && masked) {
      clear_nonfinite<ELEMENT, THREADS>(q_tile(now));  // the LSE of such a row is NaN anyway
      return __syncthreads_or(clear_nonfinite<ELEMENT, THREADS>(do_tile(now)));
    }
    __syncthreads();
    return false;
  }
};
