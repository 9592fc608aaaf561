// A consumer of forward_sm90: a warpgroup that multiplies 64 rows of queries with the tiles of keys that they see.
//
// Intra-warpgroup overlap: in each step the scores of tile n and the output of tile n + 1 are multiplied together, and
// the softmax of tile n runs while the tensor cores still multiply the output:
//
//     tensor cores   | S(n) = Q K(n) |  O += P(n+1) V(n+1)    |  other consumers' products  | S(n-1) = Q K(n-1) | ..
//     this warpgroup | issue both    | wait S | softmax(n): P(n)     | wait O | pack, rescale | issue both ..
//
// Ping-pong scheduling (PINGPONG): consumers take turns to issue, so that the tensor cores work for one while another
// computes its softmax. Keys go from the last tile to the first: tiles with a mask come first and last, and those
// between have none.
#pragma once

#include "forward_sm90/store.cuh"

// Tensor cores keep about 14 bits of a sum of 8-bit products, so each tile's P V is summed from 0, PIECE columns at a
// time, and added to O in fp32. If registers do not hold a piece beside the scores, it is multiplied before them.
constexpr int PIECE = DIM_V / PIECES;
constexpr bool VALUES_FIRST = FP8 && (DIM > 128 || DIM_V > 128 || CONSUMERS == 3 || BLOCK_N > 128);
using Sums = float[PIECE / 2];

constexpr bool PINGPONG = DIM_V <= 128 && !VALUES_FIRST;  // wider ones have little softmax to hide
constexpr bool EARLY_RESCALE = DIM_V > 128 && !FP8;       // while S is multiplied rather than after O was

// Adds a piece to O, which is rescaled on the way.
DEVICE void add_piece(Output& o, const Sums& sums, const float (&correction)[2], int piece) {
#pragma unroll
  for (int i = 0; i < PIECE / 2; i++) {
    float& x = o[piece * PIECE / 2 + i];
    x = fmaf(x, correction[half_of_register(i)], sums[i]);
  }
}

// The keys up to the first row's diagonal or right edge of the window, and those before the last row's left edge.
DEVICE int keys_seen_by_all(const Work& work) {
  const Mask& mask = work.mask;
#if POSITIONS
  const int own = mask.positions.row(work.row_begin);
  return mask.keys_up_to(CAUSAL ? own : mask.reach.end(own + 1) - 1);
#else
  const int own_end = work.row_begin + mask.diagonal + 1;
  return CAUSAL ? own_end : mask.reach.end(own_end);
#endif
}
DEVICE int keys_hidden_from_some(const Work& work) {
  const Mask& mask = work.mask;
#if POSITIONS
  return mask.keys_up_to(mask.reach.first(mask.positions.row(work.row_end() - 1)) - 1);
#else
  return at_least(0, mask.reach.first(work.row_end() - 1 + mask.diagonal));
#endif
}

#if BLOCK_MASK
// Lists have an order of their own, so each tile is checked by itself.
constexpr bool MASKS = true;

DEVICE void find_whole_tiles(uint32_t (&)[2], const Work&) {}
DEVICE bool needs_mask(const uint32_t (&)[2], const Work& work, int, int first_key) {
  return !work.mask.all_visible(work.row_begin, work.row_end(), first_key, first_key + BLOCK_N);
}
#else
constexpr bool MASKS = CAUSAL || WINDOW;  // of other tiles than the last one

// The tiles [whole[0], whole[1]) that all rows see whole. Of the others, those that the diagonal or the window's right
// edge crosses come last in the sequence, those of its left edge and of the sink tokens first.
DEVICE void find_whole_tiles(uint32_t (&whole)[2], const Work& work) {
  const KeyTiles& tiles = work.keys;
  whole[0] = 0;
  whole[1] = uint32_t(tiles.count());
  if constexpr (CAUSAL || WINDOW) {
    const int seen_by_all = keys_seen_by_all(work);  // from key 0 on
    whole[1] = at_least(tiles.sinks, at_least(0, seen_by_all) / BLOCK_N - tiles.begin + tiles.sinks);
  }
  if constexpr (WINDOW) {
    const int hidden = keys_hidden_from_some(work);
    whole[0] = at_least(tiles.sinks, (hidden + BLOCK_N - 1) / BLOCK_N - tiles.begin + tiles.sinks);
  }
  ptx::pin_registers(whole);  // otherwise ptxas computes them again in each step
}
DEVICE bool needs_mask(const uint32_t (&whole)[2], const Work&, int n, int) {
  return (WINDOW && n < int(whole[0])) || n >= int(whole[1]);
}
#endif

// What a consumer keeps in registers for a tile of rows.
struct Registers {
  Scores s;
  Weights p;
  Output o;
  SoftmaxRow softmax[2];
  float correction[2];  // of what was summed before the tile whose weights p are
};

struct Consumer {
  const Sm90Params& all;
  Shared shared;
  int number;
  Ring<STAGES> keys{0, 0}, values{0, 0};
  uint32_t q_parity = 0;
  uint32_t pingpong[2] = {};  // named barriers: the consumer's own, and the next one's

  // The outline, which forward_sm90.cu defines.
  __device__ __forceinline__ void run();
  __device__ __forceinline__ void attend(const Work& work);
  __device__ __forceinline__ void mainloop(Registers& r, const Work& work, const Rows& rows);
  __device__ __forceinline__ void mainloop_step(Registers& r, const Rows& rows, bool more, int first_key, bool masked, bool full);
  __device__ __forceinline__ void mainloop_step_apart(Registers& r, const Rows& rows, int first_key, bool masked, bool full);

  // The last tile of keys: its scores and weights, with nothing to multiply beside them.
  __device__ __forceinline__ void first_scores(Registers& r, const Work& work, const Rows& rows) {
    const int last = work.last_tile(), first_key = work.first_key(last);
    ptx::mbarrier_wait(shared.q_full(number), q_parity);
    q_parity ^= 1;
    if (DESCALES && rows.negated) negate_queries();
    wait_for_keys();
    ptx::wgmma_fence();
    multiply_keys(r.s);
    Kept kept;
    if constexpr (DROPOUT) draw_kept(kept, rows, first_key);
    BiasTile bias;
    if constexpr (BIAS) load_bias<true>(bias, rows, first_key);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(r.s);
    release_keys();
    score<true>(r.s, rows, bias, first_key, work.is_full(last));
    apply_mask(r.s, rows, first_key);
    float unused[2];
    start(r.softmax, rows.exponents);
    softmax_tile<true>(r.s, r.softmax, unused, rows.exponents);
    if constexpr (DROPOUT) drop_weights(r.s, kept);
    pack(r.p, r.s);
    if (OTHERS_FOLLOW && !FP8) clear_values_past(work.mask.seqlen_k - first_key);
    if (!VALUES_FIRST && work.tile_before(last) >= 0) wait_for_keys();
  }

  // Adds the values of the first tile, whose weights are left.
  __device__ __forceinline__ void last_values(Registers& r) {
    if (EARLY_RESCALE) rescale(r.o, r.correction);
    if constexpr (FP8) return add_values(r);
    wait_for_values();
    ptx::pin_registers(r.o);
    ptx::pin_registers(r.p);
    ptx::wgmma_fence();
    multiply_values(r.o, r.p);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(r.o);
    ptx::pin_registers(r.p);
    release_values();
  }

  // S = Q K^T: 64 rows, all keys of the tile, DIM summed in steps of 32 bytes.
  __device__ __forceinline__ void multiply_keys(Scores& s) {
    const uint64_t q = QBoxes::rows(shared.q(number)), k = KBoxes::rows(shared.k(keys.stage));
#pragma unroll
    for (int n = 0; n < DIM / STEP; n++) {
      ptx::wgmma_ss<BLOCK_N, OPERAND>(s, q + QBoxes::column_step(n), k + KBoxes::column_step(n), n > 0);
    }
    ptx::wgmma_commit();
  }

  // O += P V: 64 rows, all columns of V, keys summed in steps of 32 bytes.
  __device__ __forceinline__ void multiply_values(Output& o, Weights& p) {
    const uint64_t v = VBoxes::columns(shared.v(values.stage));
#pragma unroll
    for (int n = 0; n < BLOCK_N / STEP; n++) {
      ptx::wgmma_rs<DIM_V, OPERAND, !FP8>(o, p[n], v + VBoxes::row_step(n), true);
    }
    ptx::wgmma_commit();
  }

  // P V of a tile, without O, for one piece of V's columns, which are rows of V transposed.
  __device__ __forceinline__ void multiply_piece(Registers& r, Sums& sums, int piece) {
    const uint64_t v = VBoxes::rows(shared.v(values.stage) + piece * PIECE * VBoxes::LINE);
#pragma unroll
    for (int n = 0; n < BLOCK_N / STEP; n++) {
      ptx::wgmma_rs<PIECE, WEIGHT, false, OPERAND>(sums, r.p[n], v + VBoxes::column_step(n), n > 0);
    }
    ptx::wgmma_commit();
  }

  // P V of a tile: each piece is multiplied, waited for and added to O in turn. If there are as many sums as scores,
  // they take the scores' registers, because at head dim 256 ptxas finds no others.
  __device__ __forceinline__ void add_values(Registers& r) {
    wait_for_values();
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++) {
      Sums own;
      Sums& sums = PIECE == BLOCK_N ? reinterpret_cast<Sums&>(r.s) : own;
      ptx::pin_registers(r.p);
      ptx::wgmma_fence();
      multiply_piece(r, sums, piece);
      ptx::wgmma_wait<0>();
      ptx::pin_registers(sums);
      ptx::pin_registers(r.p);
      add_piece(r.o, sums, r.correction, piece);
    }
    release_values();
  }

  // After the last key of a packed sequence come values of another one, and in a cache unused rows; 0 * NaN is NaN.
  // Each consumer clears them for itself, and the others write the same.
  __device__ __forceinline__ void clear_values_past(int count) {
    if (count >= BLOCK_N) return;
    constexpr int UNITS = DIM_V / 8;
    const uint32_t zeros[4] = {0, 0, 0, 0};
    wait_for_values();
#pragma unroll 1
    for (int n = count * UNITS + threadIdx.x % WARPGROUP; n < BLOCK_N * UNITS; n += WARPGROUP) {
      ptx::store_shared_v4(VBoxes::place(shared.v(values.stage), n / UNITS, n % UNITS), zeros);
    }
    ptx::fence_proxy_async();
    sync_consumer(number);
  }

  // Flips the sign, the highest bit, of all elements. Done for a negative descale, once a tile of rows.
  __device__ __forceinline__ void negate_queries() {
    static_assert(!DESCALES || FP8, "a word holds four elements");
#pragma unroll 1
    for (uint32_t at = threadIdx.x % WARPGROUP * 16; at < QBoxes::BYTES; at += WARPGROUP * 16) {
      uint32_t words[4];
      ptx::load_shared_v4(words, shared.q(number) + at);
#pragma unroll
      for (int i = 0; i < 4; i++) words[i] ^= 0x80808080u;
      ptx::store_shared_v4(shared.q(number) + at, words);
    }
    ptx::fence_proxy_async();
    sync_consumer(number);
  }

  __device__ __forceinline__ void wait_for_keys() { ptx::mbarrier_wait(shared.k_full(keys.stage), keys.parity); }
  __device__ __forceinline__ void wait_for_values() { ptx::mbarrier_wait(shared.v_full(values.stage), values.parity); }
  __device__ __forceinline__ void release_keys() {
    release(shared.k_empty(keys.stage));
    keys.advance();
  }
  __device__ __forceinline__ void release_values() {
    release(shared.v_empty(values.stage));
    values.advance();
  }
  // One arrival a warp.
  __device__ __forceinline__ void release(uint32_t barrier) {
    if (lane_id() == 0) ptx::mbarrier_arrive(barrier);
  }

  __device__ __forceinline__ void pingpong_wait() { ptx::barrier_sync(int(pingpong[0]), 2 * WARPGROUP); }
  __device__ __forceinline__ void pingpong_pass() { ptx::barrier_arrive(int(pingpong[1]), 2 * WARPGROUP); }
};
