// The scores of one consumer of backward_sm90, from product to gradient: 64 keys down, the queries of a tile across.
//
//                 queries 0 1 2 ..  of the tile                    lane 4g + t of warp w
//   keys 16w ..   s[4j + 0..1]   | s s | s s | ..                  key 16w + g      queries 8j + 2t, 8j + 2t + 1
//        16w + 8  s[4j + 2..3]   | s s | s s | ..                  key 16w + g + 8  the same queries
//
//   S^T --scale, options--> scores --2^(score - lse)--> P^T --dropout-->   packed, the A operand of dV += P^T dO
//   dP^T --dropout, delta, times P--> dscores (dbias) --times the derivative of the options--> dS^T
//                                         packed, the A operand of dK += dS^T Q; in shared memory, of dQ
//
// The derivative needs the products, which are gone when dP is there. So P is multiplied by the derivative at once,
// after it is packed.
#pragma once

#include "backward/bounds.cuh"
#include "common/score_gradient.cuh"
#include "backward_sm90/work.cuh"
#include "mma/dropout.cuh"
#include "mma/softmax.cuh"
#include "ptx/atomic.cuh"

using Format = FormatOf<ELEMENT>;
using Scores = float[QUERIES / 2];
using Weights = uint32_t[QUERIES / 16][4];

// Whether rows past the end have to be told apart: with a mask, because a key that is set aside has NaN scores there
// too, and with options, because they may change the score of a product of 0.
constexpr bool HIDES_ROWS = HIDES || WITH_OPTIONS;
// Options need registers, so dP is multiplied after the weights are packed, and the options overlap with no product.
constexpr bool DP_LATER = WITH_OPTIONS;
constexpr bool DV_FIRST = (BIAS && DROPOUT) || KEEPS_PRODUCTS;  // whether dV is done before dS is computed, too

// Whether no register is left for an index that is computed ahead of its use.
constexpr bool FEWEST_REGISTERS = BIAS_GRADIENT && DROPOUT && (DETERMINISTIC || KEEPS_PRODUCTS);

// A thread's two keys, key and key + 8.
struct Keys {
  int key;
  int ds_exponent;  // log2 of dS's factor
  float factor[2];  // of products: the scale, in base 2 if SCALE_ONLY; NaN for a key that holds a NaN or an infinity

  __device__ __forceinline__ int of(int half) const { return key + 8 * half; }
};

// The thread's number, from which ptxas computes nothing ahead, because registers would not suffice to keep it.
DEVICE int fresh_thread() {
  uint32_t thread[1] = {threadIdx.x};
  ptx::pin_registers(thread);
  return int(thread[0]);
}

// What a step has to look at besides its products.
struct Hidden {
  bool masked;  // whether the consumer's pairs may be hidden
  bool block;   // whether those of loaded rows and keys of the block may be
};

// tile_begin, row_begin: the first row of the tile, and of the consumer's scores.
DEVICE Hidden hidden_pairs(const Work& work, int tile_begin, int row_begin, int first_key) {
  const int tile_end = at_most(work.at.seqlen_q, tile_begin + BLOCK_M);
  const int row_end = SHARED_KEYS ? at_most(work.at.seqlen_q, row_begin + QUERIES) : tile_end;
  const int key_end = at_most(work.at.seqlen_k, work.key_begin + BLOCK_N);
  const bool past_end = (VARLEN || WITH_OPTIONS) && row_begin + QUERIES > work.at.seqlen_q;
  const bool tile_past_end = SHARED_KEYS ? tile_begin + BLOCK_M > work.at.seqlen_q : past_end;
  return {past_end || !work.mask.all_visible(row_begin, row_end, first_key, first_key + KEYS),
          HIDES && ((VARLEN && tile_past_end) || !work.mask.all_visible(tile_begin, tile_end, work.key_begin, key_end))};
}

// The queries of the tile that see a key, counted from the thread's first one: [begin, end).
DEVICE SeenRows seen_queries(const Work& work, int key, int row_begin) {
  const int first_row = row_begin + fresh_thread() % 4 * 2;
  const SeenRows rows = work.mask.rows(work.at.seqlen_q, key, key + 1);
  return {key < work.at.seqlen_k ? rows.begin - first_row : QUERIES, rows.end - first_row};
}
DEVICE bool hides(const SeenRows& seen, int query) { return query < seen.begin || (HIDES_ROWS && query >= seen.end); }

// Sets the values of hidden pairs to 0. The rows that see a key are one range.
DEVICE void apply_mask(Scores& s, const Work& work, const Keys& keys, int row_begin) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const SeenRows seen = seen_queries(work, keys.of(half), row_begin);
#pragma unroll
    for (int i = 0; i < QUERIES / 4; i++) {
      if (hides(seen, column_at(i))) s[register_at(half, i)] = 0.0f;
    }
  }
}

static_assert(NATURAL_LSE == !SCALE_ONLY, "the LSE has the scores' unit");

// Line 11 of algorithm 2, P = exp(S - L): products to weights 2^(score - lse).
DEVICE void compute_p(Scores& s, const Keys& keys, uint32_t lses) {
#pragma unroll
  for (int block = 0; block < QUERIES / 8; block++) {
    uint32_t lse[2];
    ptx::load_shared_v2(lse, lses + block * 32 + lane_id() % 4 * 8);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float& x = s[4 * block + e];
      x = ptx::ex2(x * keys.factor[e / 2] - ptx::as_float(lse[e % 2]));
    }
  }
}

// The score of a product that is scaled already, in the order of common/score.cuh. `derivative`: of the score with
// respect to the product. distance: of ALiBi, signed.
DEVICE float score_of(const Score<float>& score, float scaled, int row, int key, float distance, float& derivative) {
  derivative = 1.0f;
  float x = scaled;
  if constexpr (SCORE_MOD) {
    x = score.mod(scaled, row, key);
    derivative = score.mod.gradient(scaled, 1.0f, row, key);
  }
  x = capped_score(score, x, derivative);
  if constexpr (ALIBI) x -= score.slope * fabsf(distance);
  if constexpr (BIAS) x = biased(x, score.bias[row * score.bias_row_stride + key]);
  return x;
}

DEVICE Score<float> scores_of(const WithScoreMod<BackwardParams>& params, const Work& work, int head) {
  Score<float> score =
      make_unmodified_score<float>(params.forward, work.at.sequence, head, work.at.kv_head, work.mask.diagonal);
  if constexpr (SCORE_MOD) score.mod = bind_score_mod(params.score_params(), work.at.sequence, head);
  return score;
}

// A bit for each of the thread's probabilities, set if it is kept: 4 * block + e, 64 queries a word.
using Kept = uint32_t[QUERIES / 64];

DEVICE void draw_kept(Kept& kept, const BackwardParams& params, const Work& work, int head, int row_begin, int first_key) {
  const Dropout dropout = make_dropout(params.forward, work.at.sequence, head);
  const int thread = fresh_thread();
#pragma unroll
  for (int i = 0; i < QUERIES / 64; i++) {
    uint32_t bits = 0;
#pragma unroll 1
    for (int block = 0; block < 8; block++) {
      bits |= kept_probabilities<1>(dropout, row_begin + 64 * i + 8 * block, first_key, thread) << 4 * block;
    }
    kept[i] = bits;
  }
}

// What weights are computed from besides products. kept_products: the thread's, in shared memory, if KEEPS_PRODUCTS.
struct WeightTerms {
  const Score<float>& scores;
  const Work& work;
  const Keys& keys;
  uint32_t lses, kept_products;
  int row_begin;
  bool masked;
};

DEVICE void keep_products(uint32_t kept_products, const Scores& s) {
#pragma unroll
  for (int block = 0; block < QUERIES / 8; block++) {
    uint32_t words[4];
#pragma unroll
    for (int e = 0; e < 4; e++) words[e] = ptx::as_bits(s[4 * block + e]);
    ptx::store_shared_v4(kept_products + block * (16 * WARPGROUP), words);
  }
}

// Line 11 with options: products to weights. visit(block, weights, derivatives, hidden) gets the thread's four of 8
// queries. Rows and keys past the end are scored as the last ones; they are hidden.
template <class Visit>
DEVICE void for_each_weight(const Scores& s, const WeightTerms& terms, Visit&& visit) {
  const auto& [scores, work, keys, lses, kept_products, row_begin, masked] = terms;
  SeenRows seen[2] = {{0, QUERIES}, {0, QUERIES}};
  if (masked) {
#pragma unroll
    for (int half = 0; half < 2; half++) seen[half] = seen_queries(work, keys.of(half), row_begin);
  }
  const int key[2] = {at_most(work.at.seqlen_k - 1, keys.of(0)), at_most(work.at.seqlen_k - 1, keys.of(1))};
  const int lane = fresh_thread() % 4, first_row = row_begin + lane * 2;
  // As floats: exact up to 2^24 keys away, and no conversion for each pair.
#if POSITIONS
  const Positions& positions = scores.positions;
  const int own = positions.row(first_row);
  const float distance[2] = {float(own - positions.key(keys.of(0))), float(own - positions.key(keys.of(1)))};
  const float step = float(positions.rows.step);
#else
  const float distance[2] = {float(first_row + scores.diagonal - keys.of(0)),
                             float(first_row + scores.diagonal - keys.of(1))};
  constexpr float step = 1.0f;
#endif
#pragma unroll
  for (int block = 0; block < QUERIES / 8; block++) {
    uint32_t lse[2];
    ptx::load_shared_v2(lse, lses + block * 32 + lane * 8);
    float weights[4], derivatives[4];
    bool hidden[4];
    uint32_t again[4];
    if constexpr (KEEPS_PRODUCTS) ptx::load_shared_v4(again, kept_products + block * (16 * WARPGROUP));
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int query = 8 * block + e % 2, row = at_most(work.at.seqlen_q - 1, first_row + query);
      float x = KEEPS_PRODUCTS ? ptx::as_float(again[e]) : s[4 * block + e], derivative = 1.0f;
      if constexpr (SCALE_ONLY) {
        x = ptx::ex2(x * keys.factor[e / 2] - ptx::as_float(lse[e % 2]));
      } else {
        const float scaled = x * keys.factor[e / 2];
        const float score = score_of(scores, scaled, row, key[e / 2], distance[e / 2] + float(query) * step, derivative);
        x = (score - ptx::as_float(lse[e % 2])) * LOG2_E;  // a product of either may overflow
        if constexpr (!SCORE_MOD) x = ptx::ex2(x);
      }
      hidden[e] = hides(seen[e / 2], query);
      // Hidden before the exponential too, which takes fewer registers than only after it.
      if constexpr (SCORE_MOD) x = ptx::ex2(hidden[e] ? -INFINITY : x);
      weights[e] = hidden[e] ? 0.0f : x;
      derivatives[e] = derivative;
    }
    visit(block, weights, derivatives, hidden);
  }
}

// `p` gets the weights that dropout keeps, packed. `s` gets all of them, times the derivatives, unless the products are kept.
DEVICE void compute_p_with_options(Weights& p, Scores& s, const Kept& kept, const WeightTerms& terms) {
  auto pack_weights = [&](int block, float(&weights)[4], const float(&derivatives)[4], const bool(&)[4]) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float x = weights[e];
      if constexpr (DROPOUT) weights[e] = kept[block / 8] >> (block % 8 * 4 + e) & 1 ? x : x * 0.0f;
      if constexpr (!KEEPS_PRODUCTS) s[4 * block + e] = GRADIENT_NEEDS_DOT ? x * derivatives[e] : x;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      p[block / 2][block % 2 * 2 + half] = Format::pack(weights[2 * half], weights[2 * half + 1]);
    }
  };
  for_each_weight(s, terms, pack_weights);
}

// What dS is computed from besides P and dP.
struct DsTerms {
  const Kept& kept;
  uint32_t deltas;
  float kept_scale, factor;
};

// Line 14, dS = P (dP - D), times a factor if DS_BITS: of the thread's four of 8 queries.
DEVICE void compute_ds(Scores& dp, int block, const float (&p)[4], const DsTerms& terms) {
  uint32_t delta[2];
  ptx::load_shared_v2(delta, terms.deltas + block * 32 + lane_id() % 4 * 8);
#pragma unroll
  for (int e = 0; e < 4; e++) {
    float& x = dp[4 * block + e];
    if constexpr (DROPOUT) x = terms.kept[block / 8] >> (block % 8 * 4 + e) & 1 ? x * terms.kept_scale : 0.0f;
    const float d = ptx::as_float(delta[e % 2]);
    const float difference = DS_BITS ? x * terms.factor - d * terms.factor : x - d;
    x = p[e] * difference;
  }
}
DEVICE void compute_ds(Scores& dp, const Scores& p, const DsTerms& terms) {
#pragma unroll
  for (int block = 0; block < QUERIES / 8; block++) {
    const float weights[4] = {p[4 * block], p[4 * block + 1], p[4 * block + 2], p[4 * block + 3]};
    compute_ds(dp, block, weights, terms);
  }
}

// Adds the gradient of a score to dbias. That of a hidden pair is 0 here and left out. i: of the thread's scores.
DEVICE void add_to_dbias(float ds, int i, float* dbias, const Strides& strides, const Keys& keys, float factor) {
  const int query = column_of_register(i) + lane_column();
  if (ds != 0.0f) ptx::reduce_add(dbias + query * strides.row + keys.of(half_of_register(i)), DS_BITS ? ds * factor : ds);
}
DEVICE float* dbias_of(const BackwardParams& params, const Work& work, int head, int row_begin) {
  return element_of<float>(params.dbias_sums, params.dbias_strides, work.at.sequence, row_begin, head);
}
DEVICE void add_to_dbias(const Scores& ds, const BackwardParams& params, const Work& work, const Keys& keys, int head,
                         int row_begin, float factor) {
  float* const dbias = dbias_of(params, work, head, row_begin);
#pragma unroll
  for (int i = 0; i < QUERIES / 2; i++) add_to_dbias(ds[i], i, dbias, params.dbias_strides, keys, factor);
}

// Line 14 if KEEPS_PRODUCTS: computes the weights from the products again, then dS. dbias is added before the
// derivatives of the scores are applied.
DEVICE void compute_ds_of_products(Scores& dp, const DsTerms& terms, const WeightTerms& weight_terms,
                                   const BackwardParams& params, int head) {
  float* const dbias = dbias_of(params, weight_terms.work, head, weight_terms.row_begin);
  const Keys& keys = weight_terms.keys;
  auto differentiate = [&](int block, const float(&weights)[4], const float(&derivatives)[4], const bool(&hidden)[4]) {
    compute_ds(dp, block, weights, terms);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float& x = dp[4 * block + e];
      if (hidden[e]) x = 0.0f;
      add_to_dbias(x, 4 * block + e, dbias, params.dbias_strides, keys, power_of_two(-keys.ds_exponent));
      x = hidden[e] ? 0.0f : x * derivatives[e];
    }
  };
  for_each_weight(dp, weight_terms, differentiate);
}

// Where the turns of a tile of dbias are counted, and this block's turn among the sequences and heads that share it.
// Each call computes it again, because registers do not suffice to keep it.
DEVICE int32_t* dbias_turns_of(const BackwardParams& params, const Work& work, const Step& step, int& turn) {
  uint32_t fresh[2] = {uint32_t(step.head), uint32_t(step.tile)};
  ptx::pin_registers(fresh);
  const int head = int(fresh[0]), tile = int(fresh[1]);
  const Strides& strides = params.dbias_strides;
  const int sequence = work.at.sequence, heads = params.forward.heads_q;
  const bool one_batch = strides.batch == 0, one_head = strides.head == 0;
  turn = (one_batch ? sequence : 0) * (one_head ? heads : 1) + (one_head ? head : 0);
  const int64_t matrix = int64_t(one_batch ? 0 : sequence) * (one_head ? 1 : heads) + (one_head ? 0 : head);
  const int key_tiles = (params.forward.seqlen_k + BLOCK_N - 1) / BLOCK_N;
  const int row_tiles = row_tiles_of(params.forward.seqlen_q);
  return params.dbias_turns + (matrix * row_tiles + tile) * key_tiles + work.key_begin / BLOCK_N;
}

DEVICE void pack(Weights& to, const Scores& from) {
#pragma unroll
  for (int i = 0; i < QUERIES / 4; i++) to[i / 4][i % 4] = Format::pack(from[2 * i], from[2 * i + 1]);
}

// Stores a consumer's dS^T, or P^T, in a tile [query][key]. Rows of dS are the A operand of dQ; if SHARED_KEYS, columns
// of both are those of dK and dV.
DEVICE void store_ds(uint32_t tile, const Weights& ds, int consumer) {
  int lane = lane_id(), warp = threadIdx.x % WARPGROUP / 32;
  if constexpr (FEWEST_REGISTERS) {
    const int thread = fresh_thread();
    lane = thread % 32;
    warp = thread % WARPGROUP / 32;
  }
  const int query = (SHARED_KEYS ? consumer * QUERIES : 0) + lane / 16 * 8 + lane % 8;
  const int unit = (SHARED_KEYS ? 0 : consumer * (KEYS / 8)) + warp * 2 + lane / 8 % 2;
#pragma unroll
  for (int i = 0; i < QUERIES / 16; i++) ptx::stmatrix_x4_trans(DsBoxes::place(tile, 16 * i + query, unit), ds[i]);
}
