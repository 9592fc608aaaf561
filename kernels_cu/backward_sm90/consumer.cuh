// A consumer of backward_sm90: a warpgroup that multiplies 64 keys with the tiles of queries that see them.
#pragma once

#include "backward_sm90/nonfinite.cuh"

using KeyGradient = float[OWN_COLUMNS / 2];
using ValueGradient = float[OWN_COLUMNS_V / 2];
using QueryGradient = float[DQ_PIECE / 2];

struct Consumer {
  const Sm90BackwardParams& all;
  Shared shared;
  int number;
  Step step{0, 0, {0, 0}, {0, 0}};
  uint32_t keys_parity = 0;
  int ds_half = 0;

  // The outline, which backward_sm90.cu defines.
  __device__ __forceinline__ void attend(const Work& work);
  __device__ __forceinline__ void inner_step(KeyGradient& dk, ValueGradient& dv, const Work& work, const Keys& keys);

  __device__ __forceinline__ int thread() const { return int(threadIdx.x) % WARPGROUP; }
  // Of the consumer: its first key, and its first query of scores, in the tile; its first columns of dK and dV.
  __device__ __forceinline__ int first_key() const { return SHARED_KEYS ? 0 : number * KEYS; }
  __device__ __forceinline__ int first_query() const { return SHARED_KEYS ? number * QUERIES : 0; }
  __device__ __forceinline__ int first_column(int columns) const { return SHARED_KEYS ? number * columns : 0; }
  // The thread's first key, in the tile.
  __device__ __forceinline__ int key() const { return first_key() + thread() / 32 * 16 + lane_id() / 4; }

  __device__ __forceinline__ Keys start_keys(const Work& work) {
    const float factor = float(all.params.forward.softmax_scale) * (SCALE_ONLY ? LOG2_E : 1.0f);
    Keys keys{work.key_begin + key(), ds_exponent(all.params, work.at.sequence, work.at.kv_head), {factor, factor}};
    ptx::mbarrier_wait(shared.keys_full(), keys_parity);
    keys_parity ^= 1;
    if constexpr (HIDES) {
      set_keys_aside(keys, shared.k(), key());
      ptx::fence_proxy_async();
      sync_consumers();
    }
    return keys;
  }

  // Waits until those that share a tile of dbias and come first have added theirs, and lets the next one begin. All
  // consumers call both.
  __device__ __forceinline__ void begin_turn(const int32_t* turns, int turn) const {
    if (threadIdx.x == WARPGROUP) {
      while (ptx::load_acquire(turns) != turn) {
      }
    }
    sync_consumers();
  }
  __device__ __forceinline__ void end_turn(int32_t* turns, int turn) const {
    if (threadIdx.x == WARPGROUP) ptx::store_release(turns, turn + 1);
  }

  // Line 10, S^T = K Q^T, and line 13, dP^T = V dO^T: 64 keys, all queries of the tile or the consumer's half of them.
  __device__ __forceinline__ void multiply_queries(Scores& s) const {
    const uint64_t k = KBoxes::rows(shared.k() + first_key() * KBoxes::LINE);
    const uint64_t q = QBoxes::rows(shared.q(step.ring.stage) + first_query() * QBoxes::LINE);
#pragma unroll
    for (int n = 0; n < DIM / STEP; n++) {
      ptx::wgmma_ss<QUERIES, OPERAND>(s, k + KBoxes::column_step(n), q + QBoxes::column_step(n), n > 0);
    }
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void multiply_gradients(Scores& dp) const {
    const uint64_t v = VBoxes::rows(shared.v() + first_key() * VBoxes::LINE);
    const uint64_t dout = DoBoxes::rows(shared.dout(step.dout_stage()) + first_query() * DoBoxes::LINE);
#pragma unroll
    for (int n = 0; n < DIM_V / STEP; n++) {
      ptx::wgmma_ss<QUERIES, OPERAND>(dp, v + VBoxes::column_step(n), dout + DoBoxes::column_step(n), n > 0);
    }
    ptx::wgmma_commit();
  }

  // Line 12, dV += P^T dO, and line 16, dK += dS^T Q: 64 keys, all columns or the consumer's half; queries are summed.
  // `a` is P^T or dS^T. If SHARED_KEYS, it is read from shared memory, because half of it is the other consumer's.
  template <class Tile, int OWN>
  __device__ __forceinline__ void add_to(float (&sum)[OWN / 2], Weights& a, uint32_t a_tile, uint32_t tile) const {
    const uint64_t rows = Tile::columns(tile + first_column(OWN) / Tile::WIDTH * Tile::BOX_BYTES);
    if constexpr (SHARED_KEYS) {
      const uint64_t scores = DsBoxes::columns(a_tile);
#pragma unroll
      for (int n = 0; n < BLOCK_M / STEP; n++) {
        ptx::wgmma_ss<OWN, OPERAND, true, true>(sum, scores + DsBoxes::row_step(n), rows + Tile::row_step(n), true);
      }
    } else {
#pragma unroll
      for (int n = 0; n < BLOCK_M / STEP; n++) ptx::wgmma_rs<OWN, OPERAND, true>(sum, a[n], rows + Tile::row_step(n), true);
    }
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void add_to_dv(ValueGradient& dv, Weights& p) const {
    add_to<DoBoxes, OWN_COLUMNS_V>(dv, p, shared.p(), shared.dout(step.dout_stage()));
  }
  __device__ __forceinline__ void add_to_dk(KeyGradient& dk, Weights& ds) const {
    add_to<QBoxes, OWN_COLUMNS>(dk, ds, shared.ds(ds_half), shared.q(step.ring.stage));
  }

  // Line 15, dQ = dS K of all keys of the block: 64 rows, which are the consumer's or all, and its columns or a piece of all.
  __device__ __forceinline__ void multiply_keys(QueryGradient& dq, int piece = 0) const {
    const int first_row = OWN_ROWS ? number * 64 : 0;
    const int first_box = (OWN_ROWS ? piece : number) * (DQ_PIECE / KBoxes::WIDTH);
    const uint64_t ds = DsBoxes::rows(shared.ds(ds_half) + first_row * DsBoxes::LINE);
    const uint64_t k = KBoxes::columns(shared.k() + first_box * KBoxes::BOX_BYTES);
#pragma unroll
    for (int n = 0; n < BLOCK_N / STEP; n++) {
      ptx::wgmma_ss<DQ_PIECE, OPERAND, false, true>(dq, ds + DsBoxes::column_step(n), k + KBoxes::row_step(n), n > 0);
    }
    ptx::wgmma_commit();
  }

  // Adds a piece of dQ to global memory: four values of each thread side by side, then the next four.
  __device__ __forceinline__ void add_dq(const QueryGradient& dq, const Work& work, int piece = 0) const {
    const int64_t slot = slot_of(all.params, work, step);
    float* const sums =
        all.params.dq_sums + slot * DQ_FLOATS + number * (DQ_BYTES / 4) + piece * (64 * DQ_PIECE) + thread() * 4;
    int32_t* const turns = all.params.dq_turns + slot * CONSUMERS + number;
    const int turn = DETERMINISTIC ? dq_turn(work, step) : 0;
    if constexpr (DETERMINISTIC) {
      if (piece == 0) {
        if (thread() == 0) {
          while (ptx::load_acquire(turns) != turn) {
          }
        }
        sync_consumer(number);
      }
    }
#pragma unroll
    for (int i = 0; i < DQ_PIECE / 8; i++) {
      const float values[4] = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
      ptx::reduce_add_v4(sums + i * (WARPGROUP * 4), values);
    }
    if constexpr (DETERMINISTIC) {
      if (piece == DQ_PIECES - 1) {
        sync_consumer(number);
        if (thread() == 0) ptx::store_release(turns, turn + 1);
      }
    }
  }

  // Hands dQ to the warp that sends it: four values of each thread side by side, then the next four.
  __device__ __forceinline__ void pass_dq(const QueryGradient& dq) const {
    ptx::barrier_sync(dq_empty(number), SENDING);
#pragma unroll
    for (int i = 0; i < DQ_COLUMNS / 8; i++) {
      uint32_t words[4];
#pragma unroll
      for (int e = 0; e < 4; e++) words[e] = ptx::as_bits(dq[4 * i + e]);
      ptx::store_shared_v4(shared.dq(number) + (i * WARPGROUP + thread()) * 16, words);
    }
    ptx::fence_proxy_async();
    ptx::barrier_arrive(dq_full(number), SENDING);
  }

  // One arrival a warp.
  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (lane_id() == 0) ptx::mbarrier_arrive(barrier);
  }

  // Stores a gradient of the consumer's keys through the shared memory of the keys (or values). A warp stores the rows
  // that it wrote there.
  template <class Tile, int WIDTH, int OWN>
  __device__ __forceinline__ void store(void* gradient, const Strides& strides, const float (&sum)[OWN / 2], const Work& work,
                                        uint32_t place, float factor) const {
    constexpr int UNITS = (WIDTH < OWN ? WIDTH : OWN) / 8;
    const int thread = fresh_thread() % WARPGROUP, lane = thread % 32;
    const int first = first_key() + thread / 32 * 16;  // the warp's first key
    const int first_unit = first_column(OWN) / 8;
#pragma unroll
    for (int block = 0; block < OWN / 8; block += 2) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        words[i] = Format::pack(sum[4 * block + 2 * i] * factor, sum[4 * block + 2 * i + 1] * factor);
      }
      ptx::stmatrix_x4(Tile::place(place, first + lane % 16, first_unit + block + lane / 16), words);
    }
    __syncwarp();
#pragma unroll 4
    for (int n = lane; n < 16 * UNITS; n += 32) {
      const int unit = first_unit + n % UNITS;
      if (SHARED_KEYS && unit >= WIDTH / 8) continue;
      uint32_t words[4];
      ptx::load_shared_v4(words, Tile::place(place, first + n / UNITS, unit));
      store_unit(gradient, strides, work, first + n / UNITS, unit, words);
    }
  }

  // Stores eight columns of a key's gradient, unless the key is past the end.
  __device__ __forceinline__ void store_unit(void* gradient, const Strides& strides, const Work& work, int key, int unit,
                                             const uint32_t (&words)[4]) const {
    const int at = work.key_begin + key;
    if (at >= work.at.seqlen_k) return;
    OUT_ELEMENT* const out =
        element_of<OUT_ELEMENT>(gradient, strides, work.at.sequence, work.at.k_start + at, work.at.kv_head) + 8 * unit;
    if (reinterpret_cast<uint64_t>(out) % 16 == 0) return ptx::store_global_v4(out, words);
#pragma unroll
    for (int i = 0; i < 8; i++) out[i].bits = uint16_t(words[i / 2] >> i % 2 * 16);
  }

  // Stores zeros for keys that no row sees, not through shared memory: the producer fills it for the next tile of keys.
  template <int WIDTH>
  __device__ __forceinline__ void store_zeros(void* gradient, const Strides& strides, const Work& work) const {
    const uint32_t zeros[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int n = thread(); n < BLOCK_N / CONSUMERS * (WIDTH / 8); n += WARPGROUP) {
      store_unit(gradient, strides, work, number * (BLOCK_N / CONSUMERS) + n / (WIDTH / 8), n % (WIDTH / 8), zeros);
    }
  }
};
