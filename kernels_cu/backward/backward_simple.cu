// Gradients on CUDA cores: the plain kernel for every precision, head dim and option, with which the fast ones are
// compared.
//
// Algorithm 2 of FlashAttention-2 (Dao, arXiv 2307.08691) with all products in float (double for double inputs), in up
// to three passes, a launch each. A block owns a tile of BLOCK_M and walks over tiles of BLOCK_N that meet it:
//
//   pass         a block owns                      and walks over                         for
//   QUERY_PASS   queries of a head                 the keys that they see                 delta of its rows, dQ
//   KEY_PASS     keys of a KV head                 the queries of its group that see them dK, dV
//   OPTION_PASS  a head, or rows of one bias       all rows, or all who share the bias    dsinks, dbias
//
// For each pair of tiles: both operands to shared memory | S and dP | P and dS to shared memory | sums. No two threads add
// to one sum, so gradients have the same bits whatever the order of the blocks.
#include "backward/keys.cuh"
#include "common/block_tile.cuh"
#include "common/half_warps.cuh"
#include "common/philox.cuh"
#include "common/score_gradient.cuh"

using BackwardLaunch = WithScoreMod<BackwardParams>;
constexpr int WIDEST = HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V;
constexpr int COLUMNS = (WIDEST + LANES - 1) / LANES;
using Sums = Real[ROWS][COLUMNS];  // of a lane: columns lane, lane + 16 and so on
using Pairs = Real[ROWS][KEYS];

constexpr int LAYOUT_BYTES = 2 * ((BLOCK_M + BLOCK_N) * PITCH + BLOCK_M * BLOCK_N) * int(sizeof(Real));
static_assert(SHARED_BYTES == LAYOUT_BYTES, "the launch must provide what two tiles of each side and of their pairs take");

// A block's shared memory. own, other: Q and dO, or K and V, of the two sides.
struct Tiles {
  Real* own[2];
  Real* other[2];
  Real* weights;    // P after dropout, HIDDEN if a row does not see a key
  Real* gradients;  // dS
};

DEVICE Tiles tiles_of(Real* shared) {
  constexpr int OWN = BLOCK_M * PITCH, OTHER = BLOCK_N * PITCH;
  Real* const pairs = shared + 2 * (OWN + OTHER);
  return {{shared, shared + OWN}, {shared + 2 * OWN, shared + 2 * OWN + OTHER}, pairs, pairs + BLOCK_M * BLOCK_N};
}

// One head of one sequence: its operands, and what turns a dot product into the gradient of its score.
struct Head {
  const BackwardLaunch& params;
  int sequence, head, kv_head;
  int seqlen_q, seqlen_k;
  int64_t q_start, k_start;
  Mask mask;
  Score<Real> score;
  Dropout dropout;

  __device__ __forceinline__ Real lse(int row) const {
    const Params& p = params.forward;
    return *element_of<const LseElement>(p.lse, p.lse_strides, sequence, q_start + row, head);
  }
  // Written by the first pass for the others.
  __device__ __forceinline__ Real& delta(int row) const {
    const int64_t slot = first_slot(params.forward, sequence, row / BLOCK_M) + head;
    return reinterpret_cast<Real*>(params.statistics)[slot * BLOCK_M + row % BLOCK_M];
  }
  // Loads Q and dO from a row on, or K and V from a key on, at most LIMIT of them.
  template <int LIMIT>
  __device__ __forceinline__ void load_queries(Real* const (&tiles)[2], int row) const {
    const Params& p = params.forward;
    const auto q = element_of<const ELEMENT>(p.q, p.q_strides, sequence, q_start + row, head);
    const auto dout = element_of<const ELEMENT>(params.dout, params.dout_strides, sequence, q_start + row, head);
    load_tile<LIMIT, HEAD_DIM>(tiles[0], q, p.q_strides.row, seqlen_q - row);
    load_tile<LIMIT, HEAD_DIM_V>(tiles[1], dout, params.dout_strides.row, seqlen_q - row);
  }
  template <int LIMIT>
  __device__ __forceinline__ void load_keys(Real* const (&tiles)[2], int key) const {
    const Params& p = params.forward;
    const auto k = element_of<const KV_ELEMENT>(p.k, p.k_strides, sequence, k_start + key, kv_head);
    const auto v = element_of<const KV_ELEMENT>(p.v, p.v_strides, sequence, k_start + key, kv_head);
    load_tile<LIMIT, HEAD_DIM>(tiles[0], k, p.k_strides.row, seqlen_k - key);
    load_tile<LIMIT, HEAD_DIM_V>(tiles[1], v, p.v_strides.row, seqlen_k - key);
  }
};

DEVICE Head make_head(const BackwardLaunch& params, const KeyPlace& at, int head) {
  const Params& p = params.forward;
  const Mask mask = make_mask(p, at.seqlen_q, at.seqlen_k, at.sequence);
  Score<Real> score = make_unmodified_score<Real>(p, at.sequence, head, at.kv_head, mask.diagonal);
  if constexpr (SCORE_MOD) score.mod = bind_score_mod(params.score_params(), at.sequence, head);
  return {params,     at.sequence, head, at.kv_head, at.seqlen_q, at.seqlen_k,
          at.q_start, at.k_start,  mask, score,      make_dropout(p, at.sequence, head)};
}

// Computes the scores of a pair of tiles and their gradients, each half-warp its own rows. own, other: the first row or
// key of the tiles. Lines 11 to 14 of algorithm 2.
template <int PASS>
DEVICE void differentiate(const Head& head, const Tiles& tiles, int own, int other) {
  const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES * ROWS;
  const Real dropout_scale = DROPOUT ? Real(head.params.forward.dropout_scale) : Real(1);
  Pairs dot = {}, dp = {};
  dot_products<HEAD_DIM>(dot, tiles.own[0] + first * PITCH, tiles.other[0] + lane * PITCH);
  dot_products<HEAD_DIM_V>(dp, tiles.own[1] + first * PITCH, tiles.other[1] + lane * PITCH);
#pragma unroll
  for (int i = 0; i < ROWS * KEYS; i++) {
    const int place = (first + i / KEYS) * BLOCK_N + i % KEYS * LANES + lane;
    tiles.weights[place] = dot[i / KEYS][i % KEYS];
    tiles.gradients[place] = dp[i / KEYS][i % KEYS];
  }
  // Not unrolled, because options would make each iteration many instructions.
#pragma unroll 1
  for (int i = 0; i < ROWS * KEYS; i++) {
    const int own_index = first + i / KEYS, other_index = i % KEYS * LANES + lane;
    const int row = PASS == KEY_PASS ? other + other_index : own + own_index;
    const int key = PASS == KEY_PASS ? own + own_index : other + other_index;
    Real& weight = tiles.weights[own_index * BLOCK_N + other_index];
    Real& gradient = tiles.gradients[own_index * BLOCK_N + other_index];
    const Real product = weight;
    weight = HIDDEN;
    if (row >= head.seqlen_q || !head.mask.visible(row, key)) continue;
    const Real lse = head.lse(row);
    // A row that sees no key has an LSE of -inf.
    const Real p = lse == -INFINITY ? Real(0) : exp_of(head.score(product, row, key) - lse);
    const bool kept = !DROPOUT || head.dropout.keeps(row, key);
    const Real dscore = p * ((kept ? gradient * dropout_scale : Real(0)) - head.delta(row));
    weight = kept ? p * dropout_scale : Real(0);
    gradient = PASS == OPTION_PASS ? dscore : score_gradient(head.score, product, dscore, row, key);
  }
  __syncwarp();  // a half-warp reads only its own rows
}

// Adds to each of the half-warp's rows those of an operand's other tile, times their factors. Hidden ones are left out.
template <int WIDTH>
DEVICE void add_rows(Sums& sums, const Tiles& tiles, const Real* factors, const Real* other) {
  const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES * ROWS;
  for (int n = 0; n < BLOCK_N; n++) {
    Real x[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const int column = c * LANES + lane;
      x[c] = column < WIDTH ? other[n * PITCH + column] : Real(0);
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const int place = (first + r) * BLOCK_N + n;
      if (tiles.weights[place] == HIDDEN) continue;
      const Real factor = factors[place];
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) sums[r][c] += factor * x[c];
    }
  }
}

// Stores the half-warp's rows, of the tile's `count`.
template <int WIDTH, class Element>
DEVICE void store_rows(Element* rows, int64_t row_stride, int count, const Sums& sums, Real scale) {
  const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES * ROWS;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    if (first + r >= count) continue;
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      const int column = c * LANES + lane;
      if (column < WIDTH) rows[(first + r) * row_stride + column] = from_real(Rounded<Element>(), sums[r][c] * scale);
    }
  }
}

// delta, D of line 4: the sum of dout * out, minus the LSE's own gradient.
DEVICE Real row_delta(const Head& head, const Real* dout, int row, int lane) {
  const BackwardParams& params = head.params;
  const Params& p = params.forward;
  const int64_t place = head.q_start + row;
  const auto out = element_of<const OUT_ELEMENT>(p.out, p.out_strides, head.sequence, place, head.head);
  Real sum = 0;
  for (int column = lane; column < HEAD_DIM_V; column += LANES) sum += dout[column] * Real(to_real(out[column]));
  sum = sum_over_lanes(sum);
  if (params.dlse != nullptr) sum -= *element_of<const float>(params.dlse, params.dlse_strides, head.sequence, place, head.head);
  return sum;
}

DEVICE void query_pass(const Head& head, const Tiles& tiles, int row_begin) {
  const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES * ROWS;
  const int row_end = at_most(head.seqlen_q, row_begin + BLOCK_M);
  __syncthreads();  // all have read the previous rows
  head.load_queries<BLOCK_M>(tiles.own, row_begin);
  __syncthreads();
  for (int own = first; own < first + ROWS; own++) {
    // A whole warp takes part in the sum, so a row past the end repeats the last one.
    const int row = row_begin + own, readable = at_most(row_end - 1, row);
    const Real delta = row_delta(head, tiles.own[1] + own * PITCH, readable, lane);
    if (lane == 0 && row < row_end) head.delta(row) = delta;
  }

  Sums dq = {};
  const KeyTiles seen = head.mask.tiles<BLOCK_N>(row_begin, row_end);
  for (int n = 0; n < seen.count(); n++) {
    const int key_begin = seen.at(n) * BLOCK_N;
    __syncthreads();  // all have read the previous keys
    head.load_keys<BLOCK_N>(tiles.other, key_begin);
    __syncthreads();
    differentiate<QUERY_PASS>(head, tiles, row_begin, key_begin);
    add_rows<HEAD_DIM>(dq, tiles, tiles.gradients, tiles.other[0]);
  }
  const BackwardParams& params = head.params;
  const auto rows = element_of<Gradient<SUMMED_Q>>(params.dq, params.dq_strides, head.sequence, head.q_start + row_begin, head.head);
  store_rows<HEAD_DIM>(rows, params.dq_strides.row, row_end - row_begin, dq, head.score.scale);
}

DEVICE void key_pass(const BackwardLaunch& params, const KeyPlace& at, const Tiles& tiles, int key_begin) {
  const int key_end = at_most(at.seqlen_k, key_begin + BLOCK_M), group = params.forward.heads_q / params.forward.heads_kv;
  Sums dk = {}, dv = {};
  __syncthreads();  // all have read the previous keys
  make_head(params, at, at.kv_head * group).load_keys<BLOCK_M>(tiles.own, key_begin);
  for (int member = 0; member < group; member++) {
    const Head head = make_head(params, at, at.kv_head * group + member);
    const SeenRows seen = head.mask.rows(at.seqlen_q, key_begin, key_end);
    for (int row_begin = seen.begin / BLOCK_N * BLOCK_N; row_begin < seen.end; row_begin += BLOCK_N) {
      __syncthreads();  // all have read the previous queries
      head.load_queries<BLOCK_N>(tiles.other, row_begin);
      __syncthreads();
      differentiate<KEY_PASS>(head, tiles, key_begin, row_begin);
      add_rows<HEAD_DIM>(dk, tiles, tiles.gradients, tiles.other[0]);
      add_rows<HEAD_DIM_V>(dv, tiles, tiles.weights, tiles.other[1]);
    }
  }
  const int64_t start = at.k_start + key_begin;
  const auto k_rows = element_of<Gradient<SUMMED_K>>(params.dk, params.dk_strides, at.sequence, start, at.kv_head);
  const auto v_rows = element_of<Gradient<SUMMED_V>>(params.dv, params.dv_strides, at.sequence, start, at.kv_head);
  store_rows<HEAD_DIM>(k_rows, params.dk_strides.row, key_end - key_begin, dk, Real(params.forward.softmax_scale));
  store_rows<HEAD_DIM_V>(v_rows, params.dv_strides.row, key_end - key_begin, dv, Real(1));
}

// A sum over the block's threads, in their order. shared: a value for each.
DEVICE Real sum_over_block(Real x, Real* shared) {
  shared[threadIdx.x] = x;
  __syncthreads();
  Real sum = 0;
  for (int thread = 0; thread < THREADS; thread++) sum += shared[thread];
  __syncthreads();
  return sum;
}

// The gradient of a head's sink: minus the sum over its rows of exp(sink - lse) * delta.
DEVICE void differentiate_sink(const BackwardLaunch& params, int head, Real* shared) {
  const Params& p = params.forward;
  const Real sink = sink_logit(p, head);
  Real sum = 0;
  for (int sequence = 0; sink != -INFINITY && sequence < params.batch; sequence++) {
    const KeyPlace at = place_keys(p, sequence, head / (p.heads_q / p.heads_kv), 0);
    const Head rows = make_head(params, at, head);
    for (int row = threadIdx.x; row < at.seqlen_q; row += THREADS) {
      const Real lse = rows.lse(row);
      if (lse != -INFINITY) sum -= exp_of(sink - lse) * rows.delta(row);
    }
  }
  sum = sum_over_block(sum, shared);
  if (threadIdx.x != 0) return;
  if (p.sinks_are_float) static_cast<float*>(params.dsinks)[head] = float(sum);
  else static_cast<OUT_ELEMENT*>(params.dsinks)[head] = from_real(Rounded<OUT_ELEMENT>(), sum);
}

#if BIAS_GRADIENT
// The gradient of BLOCK_M rows of a bias, or of its one row: summed over the sequences, heads and rows that share it. A
// stride of 0 means that they share it.
DEVICE void differentiate_bias(const BackwardLaunch& params, int block, const Tiles& tiles) {
  const Params& p = params.forward;
  const Strides& strides = params.dbias_strides;
  const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES * ROWS;
  const bool one_row = strides.row == 0, one_head = strides.head == 0, one_batch = strides.batch == 0;
  const int parts = one_row ? 1 : row_tiles_of(p.seqlen_q), heads = one_head ? 1 : p.heads_q;
  const int part = block % parts, own_head = block / parts % heads, own_sequence = block / parts / heads;
  const int row_limit = one_row ? p.seqlen_q : at_most(p.seqlen_q, (part + 1) * BLOCK_M);
  BIAS_ELEMENT* const dbias = element_of<BIAS_ELEMENT>(params.dbias, strides, own_sequence, 0, own_head);

  for (int key_begin = 0; key_begin < p.seqlen_k; key_begin += BLOCK_N) {
    Pairs sums = {};
    for (int sequence = one_batch ? 0 : own_sequence; sequence < (one_batch ? params.batch : own_sequence + 1); sequence++) {
      for (int number = one_head ? 0 : own_head; number < (one_head ? p.heads_q : own_head + 1); number++) {
        const Head head = make_head(params, place_keys(p, sequence, number / (p.heads_q / p.heads_kv), 0), number);
        __syncthreads();  // all have read the previous keys
        head.load_keys<BLOCK_N>(tiles.other, key_begin);
        for (int row_begin = part * BLOCK_M; row_begin < row_limit; row_begin += BLOCK_M) {
          __syncthreads();  // all have read the previous queries
          head.load_queries<BLOCK_M>(tiles.own, row_begin);
          __syncthreads();
          differentiate<OPTION_PASS>(head, tiles, row_begin, key_begin);
#pragma unroll
          for (int i = 0; i < ROWS * KEYS; i++) {
            const int place = (first + i / KEYS) * BLOCK_N + i % KEYS * LANES + lane;
            if (tiles.weights[place] != HIDDEN) sums[i / KEYS][i % KEYS] += tiles.gradients[place];
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < ROWS * KEYS; i++) {
      const int r = i / KEYS, column = i % KEYS * LANES + lane, row = part * BLOCK_M + first + r;
      if (one_row) tiles.gradients[(first + r) * BLOCK_N + column] = sums[r][i % KEYS];
      else if (row < row_limit && key_begin + column < p.seqlen_k) {
        dbias[row * strides.row + key_begin + column] = from_real(Rounded<BIAS_ELEMENT>(), sums[r][i % KEYS]);
      }
    }
    if (!one_row) continue;
    __syncthreads();  // the sums of all rows are there
    for (int column = threadIdx.x; column < at_most(BLOCK_N, p.seqlen_k - key_begin); column += THREADS) {
      Real sum = 0;
      for (int row = 0; row < BLOCK_M; row++) sum += tiles.gradients[row * BLOCK_N + column];
      dbias[key_begin + column] = from_real(Rounded<BIAS_ELEMENT>(), sum);
    }
  }
}
#endif

DEVICE void option_pass(const BackwardLaunch& params, const Tiles& tiles) {
  int block = blockIdx.x;
  if constexpr (SINKS) {
    if (block < params.forward.heads_q) return differentiate_sink(params, block, tiles.weights);
    block -= params.forward.heads_q;
  }
#if BIAS_GRADIENT
  differentiate_bias(params, block, tiles);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_simple(const __grid_constant__ BackwardLaunch params) {
  DYNAMIC_SHARED(shared);
  const Tiles tiles = tiles_of(reinterpret_cast<Real*>(shared));
  const Params& p = params.forward;
  // Each loop runs once, unless a sequence is longer than the caller said: lengths on the device cannot be checked.
  if (params.pass == QUERY_PASS) {
    const int row_tiles = row_tiles_of(p.seqlen_q);
    const RowPlace at = locate_rows(p, row_tiles);
    const KeyPlace keys = place_keys(p, at.sequence, at.head / (p.heads_q / p.heads_kv), 0);
    const Head head = make_head(params, keys, at.head);
    for (int tile = at.tile; tile < row_tiles_of(at.seqlen_q); tile += row_tiles) query_pass(head, tiles, tile * BLOCK_M);
  } else if (params.pass == KEY_PASS) {
    const int key_tiles = (p.seqlen_k + BLOCK_M - 1) / BLOCK_M;
    const KeyPlace at = locate_keys(p, key_tiles, BLOCK_M, int(blockIdx.x));
    for (int key = at.part * BLOCK_M; key < at.seqlen_k; key += key_tiles * BLOCK_M) key_pass(params, at, tiles, key);
  } else {
    option_pass(params, tiles);
  }
}
