// The scores of one warp of backward_mma: 16 * KEY_ROWS keys down, some queries across, from product to gradient.
//
//              queries 0 1 2 .. of the pass                 lane 4g + t of the warp
//   keys 0 ..  s[r][block][0..1]  | s s | s s | ..            keys g      queries 2t, 2t + 1 of every block of 8
//        8 ..  s[r][block][2..3]  | s s | s s | ..            keys g + 8  the same queries
//
//   S^T --scale, options--> scores --2^(score - lse)--> P^T         lse and delta belong to queries: two of each a lane
//   dP^T --dropout, delta, times P--> dscores (dbias) --score_gradient.cuh--> dS^T
#pragma once

#include "backward/ring.cuh"
#include "mma/dropout.cuh"
#include "mma/softmax.cuh"
#include "ptx/atomic.cuh"
#include "common/score_gradient.cuh"

using KeyColumns = Columns<QTile, HEAD_DIM, COLUMN_WARPS>;
using ValueColumns = Columns<DoTile, HEAD_DIM_V, COLUMN_WARPS>;
using KeyGradient = float[2 * KeyColumns::PAIRS][KEY_ROWS][4];
using ValueGradient = float[2 * ValueColumns::PAIRS][KEY_ROWS][4];

// If accumulators of dK and dV leave few registers, scores are computed for fewer queries at a time, pass after pass.
constexpr int ACCUMULATORS = 8 * KEY_ROWS * (KeyColumns::PAIRS + ValueColumns::PAIRS);
constexpr bool ROOMY = SCALE_ONLY && !DROPOUT && !WINDOW;  // few other values are in registers
constexpr int LIMIT = ACCUMULATORS <= 96 ? 64 : ROOMY ? 32 : 16;
constexpr int PASS = QUERIES < LIMIT ? QUERIES : LIMIT;
constexpr int PASSES = QUERIES / PASS;
constexpr int QUERY_BLOCKS = PASS / 8;
static_assert(PASSES * PASS == QUERIES && (QUERY_BLOCKS & (QUERY_BLOCKS - 1)) == 0, "passes begin inside a group");
using Scores = float[KEY_ROWS][QUERY_BLOCKS][4];

// The place of a warp in a tile.
struct WarpPlace {
  int first_key;    // of its 16 * KEY_ROWS keys, in the tile
  int column_warp;  // of COLUMN_WARPS
  int first_query;  // of the pass, in the tile

  __device__ __forceinline__ int key(int row, int half) const { return first_key + 16 * row + 8 * half + lane_id() / 4; }
  __device__ __forceinline__ int query(int block, int i) const {
    return first_query + 8 * block + lane_id() % 4 * 2 + i;
  }
};

DEVICE WarpPlace warp_place() {
  const int warp = int(threadIdx.x) / 32, column_warp = warp / KEY_WARPS;
  return {warp % KEY_WARPS * 16 * KEY_ROWS, column_warp, SPLIT ? column_warp * QUERIES : 0};
}

// What a block keeps while it walks over query tiles.
struct Work {
  const Ring& ring;
  const WithScoreMod<BackwardParams>& params;
  WarpPlace warp;
  Mask mask;
  int key_begin;
  float poison[KEY_ROWS][2];  // NaN for a key with a NaN or an infinity, else 0

  __device__ __forceinline__ int key(int row, int half) const { return key_begin + warp.key(row, half); }
  // Rows past the end are treated as the last row, so that they read no bias of their own; their weights are 0.
  __device__ __forceinline__ int row(const Step& now, int block, int i) const {
    return at_most(ring.at.seqlen_q - 1, now.tile * BLOCK_M + warp.query(block, i));
  }
  __device__ __forceinline__ Score<float> score(int head) const {
    const KeyPlace& at = ring.at;
    Score<float> score = make_unmodified_score<float>(params.forward, at.sequence, head, at.kv_head, mask.diagonal);
    if constexpr (SCORE_MOD) score.mod = bind_score_mod(params.score_params(), at.sequence, head);
    return score;
  }
  __device__ __forceinline__ Dropout dropout(int head) const {
    const Params& params = ring.params.forward;
    return make_dropout(params, ring.at.sequence, head);
  }
};

DEVICE void copy_scores(Scores& to, const Scores& from) {
#pragma unroll
  for (int i = 0; i < KEY_ROWS * QUERY_BLOCKS * 4; i++) {
    to[i / 4 / QUERY_BLOCKS][i / 4 % QUERY_BLOCKS][i % 4] = from[i / 4 / QUERY_BLOCKS][i / 4 % QUERY_BLOCKS][i % 4];
  }
}

// `begin_turn` waits until `turn` others have ended theirs; `end_turn` lets the next one begin. All threads call both.
DEVICE void begin_turn(const int32_t* turns, int turn) {
  if (threadIdx.x == 0) {
    while (ptx::load_acquire(turns) != turn) {
    }
  }
  __syncthreads();
}
DEVICE void end_turn(int32_t* turns, int turn) {
  __syncthreads();
  if (threadIdx.x == 0) ptx::store_release(turns, turn + 1);
}

// Sets the values of hidden pairs to 0. The rows that see a key are one range.
DEVICE void apply_mask(Scores& s, const Work& work, const Step& now) {
  const int first_row = now.tile * BLOCK_M + work.warp.query(0, 0);
#pragma unroll
  for (int i = 0; i < 2 * KEY_ROWS; i++) {
    const int key = work.key(i / 2, i % 2);
    const SeenRows rows = work.mask.rows(work.ring.at.seqlen_q, key, key + 1);
    const int begin = rows.begin - first_row, end = key < work.mask.seqlen_k ? rows.end - first_row : 0;
#pragma unroll
    for (int j = 0; j < 2 * QUERY_BLOCKS; j++) {
      const int query = column_at(j);
      if (query < begin || query >= end) s[i / 2][j / 2][i % 2 * 2 + j % 2] = 0.0f;
    }
  }
}

// Replaces each score by change(score, r, block, e, row, key). Scores of keys past the end stay as they are: they are
// hidden, and no operand belongs to them.
template <class Change>
DEVICE void change_scores(Scores& s, const Work& work, const Step& now, Change change) {
#pragma unroll
  for (int i = 0; i < 2 * KEY_ROWS; i++) {
    const int key = work.key(i / 2, i % 2);
    if (key >= work.mask.seqlen_k) continue;
#pragma unroll
    for (int j = 0; j < 2 * QUERY_BLOCKS; j++) {
      const int block = j / 2, e = i % 2 * 2 + j % 2;
      float& x = s[i / 2][block][e];
      x = change(x, i / 2, block, e, work.row(now, block, j % 2), key);
    }
  }
}

static_assert(NATURAL_LSE == !SCALE_ONLY, "the LSE has the scores' unit");

// Line 11 of algorithm 2, P = exp(S - L): products to weights 2^(score - lse). A mask may make scores as low as float
// goes, so the lse is subtracted first: such a score times log2(e) overflows.
DEVICE void compute_p(Scores& s, const Work& work, const Score<float>& score, const Step& now) {
  const float to_log2 = score.scale * LOG2_E;
  if constexpr (!SCALE_ONLY) {
    change_scores(s, work, now, [&](float x, int, int, int, int row, int key) { return score(x, row, key); });
  }
#pragma unroll
  for (int block = 0; block < QUERY_BLOCKS; block++) {
    uint32_t lse[2];
    ptx::load_shared_v2(lse, work.ring.statistics(now) + work.warp.query(block, 0) * 4);
#pragma unroll
    for (int r = 0; r < KEY_ROWS; r++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float& x = s[r][block][e];
        x = ptx::ex2(SCALE_ONLY ? x * to_log2 - ptx::as_float(lse[e % 2]) : (x - ptx::as_float(lse[e % 2])) * LOG2_E);
      }
    }
  }
}

// Drops weights. kept: bit 4 * block + e of a row is set if that weight was kept. A dropped NaN stays NaN.
DEVICE void drop(Scores& weights, uint32_t (&kept)[KEY_ROWS], const Work& work, const Step& now) {
  const Dropout dropout = work.dropout(now.head);
  const int first_row = now.tile * BLOCK_M + work.warp.first_query;
#pragma unroll
  for (int r = 0; r < KEY_ROWS; r++) {
    kept[r] = kept_probabilities<QUERY_BLOCKS>(dropout, first_row, work.key_begin + work.warp.first_key + 16 * r);
#pragma unroll
    for (int i = 0; i < 4 * QUERY_BLOCKS; i++) {
      if (!(kept[r] >> i & 1)) weights[r][i / 4][i % 4] *= 0.0f;
    }
  }
}

// Where the turns of a tile of dbias are counted, and this block's turn among the sequences and heads that share it.
DEVICE int32_t* dbias_turns_of(const Work& work, const Step& now, int& turn) {
  const BackwardParams& params = work.ring.params;
  const Strides& strides = params.dbias_strides;
  const int sequence = work.ring.at.sequence, head = now.head, heads = params.forward.heads_q;
  const bool one_batch = strides.batch == 0, one_head = strides.head == 0;
  turn = (one_batch ? sequence : 0) * (one_head ? heads : 1) + (one_head ? head : 0);
  const int64_t matrix = int64_t(one_batch ? 0 : sequence) * (one_head ? 1 : heads) + (one_head ? 0 : head);
  const int key_tiles = (params.forward.seqlen_k + BLOCK_N - 1) / BLOCK_N;
  const int64_t row = matrix * row_tiles_of(params.forward.seqlen_q) + now.tile;
  return params.dbias_turns + row * key_tiles + work.key_begin / BLOCK_N;
}

// Line 14, dS = P (dP - D): dP to the gradient of the scores, times the factor if DS_BITS. With BIAS_GRADIENT the
// factor is left to scale_ds, because dbias takes none.
DEVICE void compute_ds(Scores& dp, const Scores& p, const uint32_t (&kept)[KEY_ROWS], const Work& work, const Step& now) {
  const float kept_scale = DROPOUT ? float(work.ring.params.forward.dropout_scale) : 1.0f;
  const float factor = power_of_two(work.ring.ds_exponent());
#pragma unroll
  for (int block = 0; block < QUERY_BLOCKS; block++) {
    uint32_t delta[2];
    ptx::load_shared_v2(delta, work.ring.statistics(now) + (BLOCK_M + work.warp.query(block, 0)) * 4);
#pragma unroll
    for (int r = 0; r < KEY_ROWS; r++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float& x = dp[r][block][e];
        if constexpr (DROPOUT) x = kept[r] >> (4 * block + e) & 1 ? x * kept_scale : 0.0f;
        const float d = ptx::as_float(delta[e % 2]);
        x = p[r][block][e] * (DS_BITS && !BIAS_GRADIENT ? x * factor - d * factor : x - d);
      }
    }
  }
}

// Adds gradients of scores to dbias, but not those of hidden pairs, whose keys may lie past the end. Rows past the end,
// which repeat the last row, are left out. Scores that several warps compute are added once.
DEVICE void add_to_dbias(const Scores& ds, const Work& work, const Step& now) {
  const BackwardParams& params = work.ring.params;
  const Strides& strides = params.dbias_strides;
  float* const dbias = element_of<float>(params.dbias_sums, strides, work.ring.at.sequence, 0, now.head);
  if (!SPLIT && work.warp.column_warp != 0) return;
#pragma unroll
  for (int i = 0; i < KEY_ROWS * QUERY_BLOCKS * 4; i++) {
    const int r = i / 4 / QUERY_BLOCKS, block = i / 4 % QUERY_BLOCKS, e = i % 4;
    const int row = work.row(now, block, e % 2);
    const bool mine = now.tile * BLOCK_M + work.warp.query(block, e % 2) == row;
    if (mine && ds[r][block][e] != 0.0f) {
      ptx::reduce_add(dbias + row * strides.row + work.key(r, e / 2), ds[r][block][e]);
    }
  }
}

// Turns gradients of scores into dS, those of the dot products without the scale.
DEVICE void differentiate_score(Scores& ds, const Scores& dot, const Work& work, const Score<float>& score, const Step& now) {
  change_scores(ds, work, now, [&](float x, int r, int block, int e, int row, int key) {
    return score_gradient(score, dot[r][block][e], x, row, key);
  });
}

// Applies the factor that compute_ds leaves out for dbias.
DEVICE void scale_ds(Scores& ds, const Work& work) {
  const float factor = power_of_two(work.ring.ds_exponent());
#pragma unroll
  for (int i = 0; i < KEY_ROWS * QUERY_BLOCKS * 4; i++) ds[i / 4 / QUERY_BLOCKS][i / 4 % QUERY_BLOCKS][i % 4] *= factor;
}
