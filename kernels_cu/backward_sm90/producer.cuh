// The warpgroup of backward_sm90 that multiplies nothing: one warp loads, and if SENDS_DQ one warp for each consumer
// sends dQ to global memory.
//
// All lanes of a warp wait, then one acts. A __syncwarp() stands between, because a lane that looks late could find the
// barrier two phases further on and wait for ever.
#pragma once

#include "backward_sm90/work.cuh"
#include "ptx/atomic.cuh"

struct Producer {
  const Sm90BackwardParams& all;
  Shared shared;
  bool leader;
  Step step{0, 0, {0, 1}, {0, 1}};
  uint32_t keys_parity = 1;

  // The outline, which backward_sm90.cu defines.
  __device__ __forceinline__ void load(const Work& work);

  template <class Tile>
  __device__ __forceinline__ void load_boxes(uint32_t place, const ptx::TensorMap* map, uint32_t full, int row, int head,
                                             int sequence, ptx::CachePolicy policy) {
#pragma unroll
    for (int box = 0; box < Tile::COUNT; box++) {
      ptx::tma_load(place + box * Tile::BOX_BYTES, map, full, box * Tile::WIDTH, row, head, VARLEN ? 0 : sequence, policy);
    }
  }

  __device__ __forceinline__ void load_keys(const Work& work) {
    ptx::mbarrier_wait(shared.keys_empty(), keys_parity);
    keys_parity ^= 1;
    __syncwarp();
    if (!leader) return;
    const int row = int(work.at.k_start) + work.key_begin;
    ptx::mbarrier_arrive_expect_tx(shared.keys_full(), KBoxes::BYTES + VBoxes::BYTES);
    load_boxes<KBoxes>(shared.k(), &all.k, shared.keys_full(), row, work.at.kv_head, work.at.sequence,
                       ptx::CachePolicy::evict_first);
    load_boxes<VBoxes>(shared.v(), &all.v, shared.keys_full(), row, work.at.kv_head, work.at.sequence,
                       ptx::CachePolicy::evict_first);
  }

  // A tile of queries with its lse, or of dO with its delta.
  template <class Tile>
  __device__ __forceinline__ void load_rows(const Work& work, const ptx::TensorMap* map, uint32_t place, uint32_t full,
                                            uint32_t empty, uint32_t parity, uint32_t statistics, int which) {
    ptx::mbarrier_wait(empty, parity);
    __syncwarp();
    if (!leader) return;
    ptx::mbarrier_arrive_expect_tx(full, Tile::BYTES + ROW_BYTES);
    load_boxes<Tile>(place, map, full, int(work.at.q_start) + step.tile * BLOCK_M, step.head, work.at.sequence,
                     ptx::CachePolicy::evict_last);
    const float* const source = all.params.statistics + (2 * slot_of(all.params, work, step) + which) * BLOCK_M;
    ptx::bulk_load(statistics, source, ROW_BYTES, full);
  }
  __device__ __forceinline__ void load_queries(const Work& work) {
    const int stage = step.ring.stage;
    load_rows<QBoxes>(work, &all.q, shared.q(stage), shared.q_full(stage), shared.q_empty(stage), step.ring.parity,
                      shared.lse(stage), 0);
  }
  __device__ __forceinline__ void load_gradients(const Work& work) {
    const int stage = step.dout_stage();
    load_rows<DoBoxes>(work, &all.dout, shared.dout(stage), shared.dout_full(stage), shared.dout_empty(stage),
                       step.dout_parity(), shared.delta(stage), 1);
  }
};

// Adds a consumer's share of dQ to global memory. DETERMINISTIC: in the order of the keys.
struct Sender {
  const Sm90BackwardParams& all;
  Shared shared;
  int consumer;
  bool leader;
  Step step{0, 0, {0, 0}, {0, 0}};

  // The outline, which backward_sm90.cu defines.
  __device__ __forceinline__ void send(const Work& work);

  __device__ __forceinline__ int32_t* turns(int64_t slot) const {
    return all.params.dq_turns + slot * CONSUMERS + consumer;
  }

  // Called by the leader only.
  __device__ __forceinline__ void add(const Work& work, int64_t slot) {
    float* const sums = all.params.dq_sums + slot * DQ_FLOATS + consumer * (DQ_BYTES / 4);
    if constexpr (DETERMINISTIC) {
      const int mine = dq_turn(work, step);
      while (ptx::load_acquire(turns(slot)) != mine) {
      }
      ptx::fence_proxy_async_global();  // what others added comes before what this one adds
      ptx::bulk_reduce_add_f32(sums, shared.dq(consumer), DQ_BYTES);
      ptx::bulk_commit();
      ptx::bulk_wait<0>();
      ptx::fence_proxy_async_global();
      ptx::store_release(turns(slot), mine + 1);
    } else {
      ptx::bulk_reduce_add_f32(sums, shared.dq(consumer), DQ_BYTES);
      ptx::bulk_commit();
      ptx::bulk_wait_read<0>();
    }
  }
};
