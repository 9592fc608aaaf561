// Attention backward on tensor cores with mma.sync, for every architecture from sm_80 on: dK and dV, and dQ in parts.
//
// FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 2, whose lines are cited here): outer_step is lines 6 to 18 for one
// tile of keys, inner_step lines 9 to 16 for one tile of queries; backward/backward_prepare.cu is line 4.
//
// A block owns BLOCK_N keys of one KV head of one sequence and walks over the query tiles that see them, of every query
// head of the group. K and V stay in shared memory; Q and dO pass through a ring of STAGES stages. Scores have keys
// down, so that a warp's scores are its next A operands:
//
//      shared memory            warp 0: 16 keys                                  warp 1 ..
//    +---------------+
//    | K, V          |--rows--> K (A)   x Q(n)  = S^T --2^(s - lse)--> P^T       the next 16 keys
//    +---------------+          V (A)   x dO(n) = dP^T --P (dP - delta)--> dS^T
//    | Q(n)   dO(n)  |--all---> P^T (A) x dO(n), added to dV  16 x HEAD_DIM_V    its own dV
//    | statistics(n) |          dS^T (A) x Q(n), added to dK  16 x HEAD_DIM      its own dK
//    |  .. STAGES    |
//    +---------------+
//    | dS^T (P^T)    |<-------- dS^T;     barrier;  dS (A, transposed) x K = 16 rows of dQ, added to global memory
//    +---------------+
//
// A warp takes WARP_TILE keys and rows of dQ: 16, or 32 if there are many queries and heads are wide, which reads each
// operand half as often. If a head is wide, COLUMN_WARPS warps share the same keys: each computes the scores of its
// part of the queries, passes them on through shared memory, and keeps its part of the columns of dK and dV. If there
// are too few queries to share (SPLIT is false), each computes all scores.
//
// dQ has as many parts as there are key tiles. They are added atomically, each lane's values side by side, in the order
// of accumulators (backward_finish puts them in rows). DETERMINISTIC adds them in the order of the keys: a block waits
// for its turn at each query tile. That costs waiting, in a pipeline of blocks that all walk the same way, but no
// memory or products. A second pass over query tiles would cost two fifths more products, and separate parts would take
// memory that grows with the square of the length. Blocks draw their numbers as they start and wait only for lower
// numbers. CUDA promises no order of blocks, so blocks that start first could otherwise fill the GPU and wait for ever.
// dK and dV are sums of one block in one order, so they have the same bits each time and in any batch.
#include "backward/params.cuh"
#include "backward/scores.cuh"
#include "mma/store.cuh"
#include "ptx/pin.cuh"

constexpr int DQ_ROWS = WARP_TILE / 16, ROW_WARPS = BLOCK_M / WARP_TILE;  // 16-row groups a warp; warps side by side
using QueryColumns = Columns<KTile, HEAD_DIM, WARPS / ROW_WARPS>;
static_assert(DQ_ROWS == 1 || sizeof(ELEMENT) == 2, "scores of floats are read 16 rows at a time");
static_assert(DQ_FLOATS == 2 * QueryColumns::PAIRS * 4 * DQ_ROWS * THREADS, "the scratch of a slot is what its block adds");

// s += keys x queries: 16 * KEY_ROWS rows of a tile of keys times the queries of a pass.
template <class Keys, class Queries>
DEVICE void multiply_queries(Scores& s, const Keys& keys, const Queries& queries, const WarpPlace& warp) {
  const LaneAddress key_lane = lane_of_a(keys, warp.first_key);
  const LaneAddress query_lane = moved(lane_of_b(queries), 0, warp.first_query * Queries::PITCH);
  multiply_rows<Keys, Queries, KEY_ROWS == 2 && ROOMY ? 4 : 1>(s, key_lane, query_lane);
}

// sum += weights x rows of a tile of queries, for the warp's columns. The weights are the warp's scores of COUNT
// queries or, if they are shared, the scores that the warps of its keys left in shared memory.
template <class Share, int COUNT, class Queries, int PAIRS>
DEVICE void add_queries(float (&sum)[PAIRS][KEY_ROWS][4], const Scores& weights, const ScoreTile& shared,
                        const Queries& queries, const WarpPlace& warp) {
  const Share columns{warp.column_warp};
  const int first = SPLIT ? 0 : warp.first_query;
  const LaneAddress rows = moved(columns.lane(Products::lane_of_values(queries)), 0, first * Queries::PITCH);
  LaneAddress scores{};
  if constexpr (SPLIT) {
    scores = sizeof(ELEMENT) == 2 ? lane_of_a(shared, warp.first_key) : lane_of_scores(shared, warp.first_key, 0);
  }
#pragma unroll SPLIT && KEY_ROWS == 1 ? 1 : COUNT / Products::KEYS
  for (int step = 0; step < COUNT / Products::KEYS; step++) {
    uint32_t a[KEY_ROWS][4];
#pragma unroll
    for (int r = 0; r < KEY_ROWS; r++) {
      if constexpr (SPLIT) load_scores<ScoreTile>(a[r], scores, 16 * r, step);
      else Products::weights(a[r], weights[r], step);
    }
#pragma unroll
    for (int pair = 0; pair < Share::PAIRS; pair++) {
      multiply_pair<Products, Queries>(sum[2 * pair], sum[2 * pair + 1], a, rows, step, Share::offset(pair),
                                       columns.blocks(pair));
    }
  }
}

// Line 12, dV += P^T dO: at once, or later if scores are shared.
DEVICE void add_to_dv(ValueGradient& dv, const Scores& weights, const Work& work, const Step& now) {
  const Ring& ring = work.ring;
  if constexpr (SPLIT) {
    const LaneAddress lane = lane_of_scores(ring.p_tile(), work.warp.first_key, work.warp.first_query);
#pragma unroll
    for (int r = 0; r < KEY_ROWS; r++) store_scores<Products, ScoreTile>(lane, weights[r], 16 * r);
  } else {
    add_queries<ValueColumns, PASS>(dv, weights, ring.p_tile(), ring.do_tile(now), work.warp);
  }
}

// Line 15, dQ += dS K, from the dS of all warps: WARP_TILE rows and some columns a warp. It is added in global memory.
DEVICE void add_to_dq(const Work& work, const Step& now) {
  constexpr int MOST = ACCUMULATORS <= 96 || ROOMY ? 4 : 2;
  constexpr int AT_ONCE = QueryColumns::PAIRS < MOST ? QueryColumns::PAIRS : MOST;
  static_assert(AT_ONCE % QueryColumns::PAIRS_A_PART == 0 || QueryColumns::PAIRS_A_PART % AT_ONCE == 0,
                "a pass begins at a part or divides it");
  constexpr bool EVEN = QueryColumns::PAIRS % AT_ONCE == 0;
  const int warp = int(threadIdx.x) / 32;
  const QueryColumns columns{warp / ROW_WARPS};
  const KTile keys = work.ring.k_tile();
  const ScoreTile shared = work.ring.ds_tile();
  const LaneAddress key_lane = columns.lane(Products::lane_of_values(keys));
  constexpr int ROW_CHUNKS = 16 / ScoreTile::CHUNK, FACTOR = ScoreTile::FACTOR;
  const int chunk = warp % ROW_WARPS * DQ_ROWS * ROW_CHUNKS;
  const LaneAddress ds_lane = moved(lane_of_scores_transposed<Products>(shared), chunk % FACTOR, chunk / FACTOR * FACTOR * 16);
  const BackwardParams& params = work.ring.params;
  const int64_t slot = work.ring.slot(now);
  int turn = 0;
  float* const sums = params.dq_sums + slot * DQ_FLOATS + threadIdx.x * REDUCE_WIDTH;
  // A few columns at a time, because few registers are left.
#pragma unroll 1
  for (int first = 0; first < QueryColumns::PAIRS; first += AT_ONCE) {
    float dq[2 * AT_ONCE][DQ_ROWS][4] = {};
    const LaneAddress columns_lane = QueryColumns::advanced(key_lane, first);
#pragma unroll KEY_ROWS == 1 || (VARLEN && REDUCE_WIDTH == 4) ? 2 : 4
    for (int step = 0; step < BLOCK_N / Products::KEYS; step++) {
      uint32_t a[DQ_ROWS][4];
#pragma unroll
      for (int r = 0; r < DQ_ROWS; r++) {
        load_scores_transposed<Products, ScoreTile>(a[r], ds_lane, step, r * ROW_CHUNKS);
      }
#pragma unroll
      for (int pair = 0; pair < AT_ONCE; pair++) {
        if (!EVEN && first + pair >= QueryColumns::PAIRS) break;
        multiply_pair<Products, KTile>(dq[2 * pair], dq[2 * pair + 1], a, columns_lane, step,
                                       QueryColumns::offset(pair), columns.blocks(first + pair));
      }
    }
    if (DETERMINISTIC && first == 0) {
#if BLOCK_MASK && DETERMINISTIC
      turn = work.ring.turn(now);
#else
      const int row_begin = now.tile * BLOCK_M;
      const int row_end = at_most(work.ring.at.seqlen_q, row_begin + BLOCK_M);
      turn = work.mask.tiles<BLOCK_N>(row_begin, row_end).before(work.key_begin / BLOCK_N);
#endif
      begin_turn(params.dq_turns + slot, turn);
    }
#pragma unroll
    for (int block = 0; block < 2 * AT_ONCE; block++) {
      if ((!EVEN && first + block / 2 >= QueryColumns::PAIRS) || columns.blocks(first + block / 2) <= block % 2) continue;
#pragma unroll
      for (int r = 0; r < DQ_ROWS; r++) {
        float* const to = sums + ((2 * first + block) * DQ_ROWS + r) * (4 * THREADS);
        if constexpr (REDUCE_WIDTH == 4) {
          ptx::reduce_add_v4(to, dq[block][r]);
        } else {
#pragma unroll
          for (int e = 0; e < 4; e++) ptx::reduce_add(to + e * THREADS, dq[block][r][e]);
        }
      }
    }
  }
  if constexpr (DETERMINISTIC) end_turn(params.dq_turns + slot, turn);
}

// Adds the nonfinite values of dO, which the product left out, to dV of the keys that their rows see.
DEVICE void add_nonfinite(ValueGradient& dv, const Work& work, const Step& now) {
  const ValueColumns columns{work.warp.column_warp};
  const Dropout dropout = work.dropout(now.head);
  const RowSource<ELEMENT> dout = work.ring.dout(now);
  const int first = now.tile * BLOCK_M;
#pragma unroll 1
  for (int row = first; row < first + BLOCK_M; row++) {
    if (!work.ring.rows.has(row)) continue;
    uint32_t seen = 0, kept = 0;  // a bit for each of the lane's keys
#pragma unroll 1
    for (int i = 0; i < 2 * KEY_ROWS; i++) {
      const int key = work.key(i / 2, i % 2);
      seen |= uint32_t(work.mask.visible(row, key)) << i;
      kept |= uint32_t(!DROPOUT || dropout.keeps(row, key)) << i;
    }
    const ELEMENT* const values = dout.rows + (row - first) * dout.stride + lane_id() % 4 * 2;
#pragma unroll
    for (int c = 0; c < 4 * ValueColumns::PAIRS; c++) {
      if (columns.blocks(c / 4) <= c / 2 % 2) continue;
      const float value = to_real(values[columns.column(c / 4) + c / 2 % 2 * 8 + c % 2]);
      const bool nonfinite = value - value != 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * KEY_ROWS; i++) {
        const float weight = !DROPOUT || kept >> i & 1 ? 1.0f : 0.0f;  // only matters as zero or positive
        if (nonfinite && seen >> i & 1) dv[c / 2][i / 2][i % 2 * 2 + c % 2] += value * weight;
      }
    }
  }
}

// Lines 10 to 14 for the queries of a pass, and line 16 if scores are not shared. dS^T goes to shared memory, and P^T
// after dropout if it is shared.
DEVICE void inner_pass(KeyGradient& dk, ValueGradient& dv, const Work& work, const Score<float>& score, const Step& now,
                          bool masked) {
  const Ring& ring = work.ring;
  const WarpPlace& warp = work.warp;
  const QTile q_tile = ring.q_tile(now);
  const DoTile do_tile = ring.do_tile(now);
  const LaneAddress ds_lane = lane_of_scores(ring.ds_tile(), warp.first_key, warp.first_query);

  Scores p, dot, dp = {};
#pragma unroll
  for (int i = 0; i < KEY_ROWS * QUERY_BLOCKS * 4; i++) {
    const int r = i / 4 / QUERY_BLOCKS, block = i / 4 % QUERY_BLOCKS;
    p[r][block][i % 4] = HIDES ? work.poison[r][i % 4 / 2] : 0.0f;
  }
  multiply_queries(p, ring.k_tile(), q_tile, warp);  // line 10, S^T = K Q^T
  if constexpr (GRADIENT_NEEDS_DOT) copy_scores(dot, p);
  compute_p(p, work, score, now);
  if (masked) apply_mask(p, work, now);
  uint32_t kept[KEY_ROWS] = {};
  if constexpr (DROPOUT) {
    Scores weights;
    copy_scores(weights, p);
    drop(weights, kept, work, now);
    add_to_dv(dv, weights, work, now);
  } else {
    add_to_dv(dv, p, work, now);
  }

  multiply_queries(dp, ring.v_tile(), do_tile, warp);  // line 13, dP^T = V dO^T
  compute_ds(dp, p, kept, work, now);
  if constexpr (BIAS_GRADIENT) {
    if (masked) apply_mask(dp, work, now);
    add_to_dbias(dp, work, now);
    if constexpr (DS_BITS) scale_ds(dp, work);
  }
  if constexpr (GRADIENT_NEEDS_DOT) differentiate_score(dp, dot, work, score, now);
  if (masked) apply_mask(dp, work, now);  // 0 times a NaN is NaN
  if (SPLIT || warp.column_warp == 0) {
#pragma unroll
    for (int r = 0; r < KEY_ROWS; r++) store_scores<Products, ScoreTile>(ds_lane, dp[r], 16 * r);
  }
  if constexpr (!SPLIT) add_queries<KeyColumns, PASS>(dk, dp, ring.ds_tile(), q_tile, warp);  // line 16, dK += dS^T Q
}

// Lines 9 to 16 for one tile of queries. masked: whether the tile may have hidden pairs; nonfinite: whether dO has values
// that its product leaves out. Both are the same for all threads.
DEVICE void inner_step(KeyGradient& dk, ValueGradient& dv, Work& work, const Step& now, bool masked, bool nonfinite) {
  const Ring& ring = work.ring;
  const Score<float> score = work.score(now.head);
  int32_t* dbias_turns = nullptr;
  int turn = 0;
  if constexpr (BIAS_GRADIENT && DETERMINISTIC) {
    dbias_turns = dbias_turns_of(work, now, turn);
    begin_turn(dbias_turns, turn);
  }
  const int first_query = work.warp.first_query;
#pragma unroll 1
  for (int pass = 0; pass < PASSES; pass++) {
    work.warp.first_query = first_query + pass * PASS;
    inner_pass(dk, dv, work, score, now, masked);
  }
  work.warp.first_query = first_query;
  __syncthreads();  // all scores are in shared memory, and all of dbias is added
  if constexpr (BIAS_GRADIENT && DETERMINISTIC) end_turn(dbias_turns, turn);
  if constexpr (SPLIT) {
    const Scores none{};
    add_queries<ValueColumns, BLOCK_M>(dv, none, ring.p_tile(), ring.do_tile(now), work.warp);  // line 12
    add_queries<KeyColumns, BLOCK_M>(dk, none, ring.ds_tile(), ring.q_tile(now), work.warp);    // line 16
  }
  if (nonfinite) add_nonfinite(dv, work, now);
  add_to_dq(work, now);
}

// A key with a NaN or an infinity leaves the tile, where the zeros of hidden pairs times it would make other rows of dQ
// NaN. Its own scores start from NaN instead (`poison`).
DEVICE void set_nonfinite_aside(Work& work) {
  const KTile keys = work.ring.k_tile();
  const LaneAddress lane = lane_of_a(keys, work.warp.first_key);
  __syncthreads();  // all keys are there
#pragma unroll
  for (int r = 0; r < KEY_ROWS; r++) {
    float sum[4] = {};
#pragma unroll 2
    for (int step = 0; step < KTile::CHUNKS / 2; step++) {
      uint32_t a[4];
      ptx::ldmatrix_x4(a, lane.at<KTile>(16 * r, 2 * step));
      Products::multiply(sum, a, 0, 0);
    }
    work.poison[r][0] = sum[0];
    work.poison[r][1] = sum[2];
  }
  __syncthreads();  // all have read the keys
  clear_nonfinite<ELEMENT, THREADS>(keys);
}

// Prepares keys that have landed for the first product.
DEVICE void prepare_keys(Work& work) {
  if constexpr (ROUNDED || HIDES) ptx::cp_async_wait<STAGES == 1 ? 0 : STAGES - 2>();
  if constexpr (ROUNDED) {
    round_rows<COMPUTE_BITS, THREADS>(work.ring.k_tile());
    round_rows<COMPUTE_BITS, THREADS>(work.ring.v_tile());
  }
  if constexpr (HIDES) set_nonfinite_aside(work);
}

static_assert(sizeof(OUT_ELEMENT) == sizeof(ELEMENT), "gradients are of the inputs' types");

// Stores two neighbouring elements of a row, like `store_pair`, but rounds both in one instruction.
template <class Element>
DEVICE void store_two(Element* out, float low, float high, bool whole) {
  if constexpr (sizeof(Element) == 2) {
    const uint32_t word = ProductsOf<Element>::pack(low, high);
    if (whole) {
      *reinterpret_cast<uint32_t*>(out) = word;
    } else {
      out[0].bits = uint16_t(word);
      out[1].bits = uint16_t(word >> 16);
    }
  } else {
    store_pair(out, low, high, whole);
  }
}

template <class Share, class Element, int PAIRS>
DEVICE void store(void* operand, const Strides& strides, const float (&sum)[PAIRS][KEY_ROWS][4], const Work& work,
                  float factor) {
  const KeyPlace& at = work.ring.at;
  const Share columns{work.warp.column_warp};
  uint32_t place[2] = {uint32_t(at.sequence), uint32_t(at.kv_head)};
  ptx::pin_registers(place);  // otherwise ptxas computes addresses before the loop, which has no registers for them
#pragma unroll
  for (int i = 0; i < 2 * KEY_ROWS; i++) {
    const int key = work.key(i / 2, i % 2);
    if (key >= at.seqlen_k) continue;
    Element* const row = element_of<Element>(operand, strides, int(place[0]), at.k_start + key, int(place[1]));
    const bool whole = stores_pairs(row);
#pragma unroll
    for (int block = 0; block < PAIRS; block++) {
      if (columns.blocks(block / 2) <= block % 2) continue;
      const float(&values)[4] = sum[block][i / 2];
      const int column = columns.column(block / 2) + block % 2 * 8 + lane_id() % 4 * 2;
      store_two(row + column, values[i % 2 * 2] * factor, values[i % 2 * 2 + 1] * factor, whole);
    }
  }
}

// Lines 6 to 18: the keys of one tile, against all rows that see them.
DEVICE void outer_step(const WithScoreMod<BackwardParams>& params, const KeyPlace& at, int key_tile, uint32_t shared) {
  const Params& forward = params.forward;
  const Mask mask = make_mask(forward, at.seqlen_q, at.seqlen_k, at.sequence);
  const int key_begin = key_tile * BLOCK_N, key_end = at_most(at.seqlen_k, key_begin + BLOCK_N);
  const SeenRows rows = mask.rows(at.seqlen_q, key_begin, key_end);
  const int heads = forward.heads_q / forward.heads_kv;
  const int tiles = rows.begin < rows.end ? (rows.end + BLOCK_M - 1) / BLOCK_M - rows.begin / BLOCK_M : 0;
#if BLOCK_MASK
  Ring ring{params, at, rows, heads, 0, tiles, 0, shared, params.score_params(), key_begin};
  for (int head = at.kv_head * heads; head < (at.kv_head + 1) * heads; head++) ring.count += ring.listed(head).count();
#else
  const Ring ring{params, at, rows, heads, rows.begin / BLOCK_M, tiles, heads * tiles, shared};
#endif
  Work work{ring, params, warp_place(), mask, key_begin, {}};

  KeyGradient dk = {};
  ValueGradient dv = {};
  if (ring.count > 0) {
    ring.fill_keys(mask, key_begin);
    if constexpr (STAGES == 1) {
      ptx::cp_async_commit();
      prepare_keys(work);
    }
    // The loop itself fills the first stages, because another copy of that code would only take time to compile.
#pragma unroll 1
    for (Step now = ring.before_first(); now.number < ring.count; now = ring.next(now)) {
      const int row_begin = now.tile * BLOCK_M, row_end = at_most(at.seqlen_q, row_begin + BLOCK_M);
      // A modification or its derivative may make NaNs of the zeros past the last row, so these are masked too.
      const bool masked = !mask.all_visible(row_begin, row_end, key_begin, key_begin + BLOCK_N) ||
                          (SCORE_MOD && row_begin + BLOCK_M > at.seqlen_q);
      const bool nonfinite = ring.advance(now, masked);
      if (BLOCK_MASK ? ring.works(now) : now.number >= 0) inner_step(dk, dv, work, now, masked, nonfinite);
      else if (!BLOCK_MASK || now.number < 0) prepare_keys(work);
    }
  }
  store<KeyColumns, Gradient<SUMMED_K>>(params.dk, params.dk_strides, dk, work,
                                        float(forward.softmax_scale) * power_of_two(-ring.ds_exponent()));
  store<ValueColumns, Gradient<SUMMED_V>>(params.dv, params.dv_strides, dv, work,
                                          DROPOUT ? float(forward.dropout_scale) : 1.0f);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    backward_mma(const __grid_constant__ WithScoreMod<BackwardParams> params) {
  DYNAMIC_SHARED(shared);
  const int parts = (params.forward.seqlen_k + BLOCK_N - 1) / BLOCK_N;
  const int number = block_number(params, ptx::shared_address(shared));
  const KeyPlace at = locate_keys(params.forward, parts, BLOCK_N, number);
  if constexpr (DS_BITS) keep_ds_exponent(ptx::shared_address(shared), ds_exponent(params, at.sequence, at.kv_head));
  // A part is one tile, unless a sequence is longer than the caller said. Its tiles are neighbours, so that a block waits
  // for none of a higher number.
  const int tiles = (at.seqlen_k + BLOCK_N - 1) / BLOCK_N, share = (tiles + parts - 1) / parts;
  for (int tile = at.part * share; tile < at_most(tiles, (at.part + 1) * share); tile++) {
    outer_step(params, at, tile, ptx::shared_address(shared));
    if (VARLEN) __syncthreads();  // all have left the tiles that the next keys overwrite
  }
}
