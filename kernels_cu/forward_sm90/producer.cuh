// The producer of forward_sm90: one warp that brings Q, K and V into shared memory by TMA, tile after tile.
//
// All its lanes wait, then one acts. A __syncwarp() stands between, because a lane that looks late could find the
// barrier two phases further on and wait for ever. (A warp of one thread would not need it, but ptxas spills there at
// the 24 registers that the producer keeps.)
#pragma once

#include "forward_sm90/schedule.cuh"

struct Producer {
  const Sm90Params& all;
  Shared shared;
  bool leader;
  Ring<STAGES> keys{0, 1};
  Ring<FP8 ? 1 : STAGES> values{0, 1};
  uint32_t q_parity = 1;

  // The outline, which forward_sm90.cu defines.
  __device__ __forceinline__ void run();
  __device__ __forceinline__ void load(const Work& work);

  __device__ __forceinline__ void load_queries(const Work& work) {
#pragma unroll
    for (int consumer = 0; consumer < CONSUMERS; consumer++) {
      ptx::mbarrier_wait(shared.q_empty(consumer), q_parity);
      __syncwarp();
      if (!leader) continue;
      ptx::mbarrier_arrive_expect_tx(shared.q_full(consumer), QBoxes::BYTES);
      const int row = work.q_start + work.row_begin + consumer * ROWS;
#pragma unroll
      for (int box = 0; box < QBoxes::COUNT; box++) {
        ptx::tma_load(shared.q(consumer) + box * QBoxes::BOX_BYTES, &all.q, shared.q_full(consumer),
                      box * QBoxes::WIDTH, row, work.head, VARLEN ? 0 : work.sequence, ptx::CachePolicy::evict_first);
      }
    }
    q_parity ^= 1;
  }

  __device__ __forceinline__ void load_keys(const Work& work, int n) {
    const int stage = keys.stage;
    load_tile<KBoxes>(work, n, &all.k, shared.k(stage), shared.k_full(stage), shared.k_empty(stage), keys.parity);
    keys.advance();
  }
  __device__ __forceinline__ void load_values(const Work& work, int n) {
    if constexpr (FP8) {
      // The transposers clear what follows the sequence's own keys.
      if (tell_transposers(at_least(0, work.mask.seqlen_k - work.keys.at(n) * BLOCK_N))) {
        bring<ArrivingV>(work, n, &all.v, shared.arriving_v(), shared.v_arrived());
      }
    } else {
      const int stage = values.stage;
      load_tile<VBoxes>(work, n, &all.v, shared.v(stage), shared.v_full(stage), shared.v_empty(stage), values.parity);
    }
    values.advance();
  }
  // Tells them the own keys of the next tile of V. False in lanes that do not act.
  __device__ __forceinline__ bool tell_transposers(int own_keys) {
    ptx::mbarrier_wait(shared.v_taken(), values.parity);
    __syncwarp();
    if (leader) ptx::store_shared(shared.own_keys(), static_cast<uint32_t>(own_keys));
    return leader;
  }
  __device__ __forceinline__ void end_values() {
    if (tell_transposers(NO_VALUES)) ptx::mbarrier_arrive(shared.v_arrived());
  }

  // Loads the n-th of the tiles that the rows see.
  template <class Tile>
  __device__ __forceinline__ void load_tile(const Work& work, int n, const ptx::TensorMap* map, uint32_t place,
                                            uint32_t full, uint32_t empty, uint32_t parity) {
    ptx::mbarrier_wait(empty, parity);
    __syncwarp();
    if (!leader) return;
    bring<Tile>(work, n, map, place, full);
  }
  template <class Tile>
  __device__ __forceinline__ void bring(const Work& work, int n, const ptx::TensorMap* map, uint32_t place,
                                        uint32_t full) {
    ptx::mbarrier_arrive_expect_tx(full, Tile::BYTES);
#pragma unroll
    for (int part = 0; part < BLOCK_N; part += PART) {
      const KeyPlace at = place_of_key(all.schedule, work, work.keys.at(n) * BLOCK_N + part);
#pragma unroll
      for (int box = 0; box < Tile::COUNT; box++) {
        ptx::tma_load(place + box * Tile::BOX_BYTES + part * Tile::LINE, map, full, box * Tile::WIDTH, at.row,
                      work.kv_head, at.batch, ptx::CachePolicy::evict_last);
      }
    }
  }
};
