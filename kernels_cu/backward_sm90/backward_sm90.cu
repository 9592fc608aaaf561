// Attention backward for Hopper (sm_90a) on warpgroup products: dK and dV, and dQ in parts.
//
// FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 2, whose lines are cited here) with the roles of FlashAttention-3
// (Shah et al., arXiv 2407.08608, section 3.1 and appendix on the backward pass): `attend` is lines 6 to 18 for one tile
// of keys, `inner_step` lines 10 to 16 for one tile of queries; backward_sm90/backward_prepare_sm90.cu is line 4.
//
// A block owns BLOCK_N keys of one KV head of one sequence and walks over the query tiles that see them, of every query
// head of the group, so that dK and dV are sums of one block in one order. Scores have keys down, so that a warpgroup's
// scores are its next A operands:
//
//      warpgroup 0                      warpgroups 1, 2: 64 keys each
//    +-----------------------+        +--------------------------------------------------------------+
//    | warp 0: the producer  |        | S^T = K Q(n)^T, dP^T = V dO(n)^T   wgmma, both in shared memory
//    |  K, V by TMA, once    |--full->| P^T = 2^(S^T - lse)                beside dP^T
//    |  Q(n), dO(n) by TMA,  |        | dV += P^T dO(n)                    wgmma, P^T in registers
//    |  lse, delta in bulk   |<-empty-| dS^T = P^T (dP^T - delta)          beside dV; to shared memory, too
//    | warps 1, 2: senders   |        | dQ(n) = dS K, its half             wgmma, dS of both warpgroups
//    |  dQ(n): shared memory |<--dQ---| dK += dS^T Q(n)                    wgmma, dS^T in registers
//    |  added to global      |        |  dQ(n) to shared memory            beside dK
//    +-----------------------+        +--------------------------------------------------------------+
//      24 registers                     240 registers
//
// dQ has as many parts as there are key tiles. They are added in the order of accumulators (backward_finish_sm90 puts
// them in rows): by senders if SENDS_DQ, else from registers. DETERMINISTIC adds them in the order of the keys, as
// backward_mma does: a part waits for its turn at each query tile, and blocks draw their numbers as they start.
#define PTX_WGMMA_STEP 32
#include "backward_sm90/consumer.cuh"
#include "backward_sm90/producer.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;

// `full` barriers take one arrival, the producer's, and the bytes that it announces; `empty` ones take an arrival of
// each warp that reads.
DEVICE void start_barriers(const Shared& shared) {
  constexpr int READERS = 4 * CONSUMERS;
  ptx::mbarrier_init(shared.keys_full(), 1);
  ptx::mbarrier_init(shared.keys_empty(), READERS);
  for (int i = 0; i < STAGES; i++) {
    ptx::mbarrier_init(shared.q_full(i), 1);
    ptx::mbarrier_init(shared.q_empty(i), READERS);
  }
  for (int i = 0; i < DO_STAGES; i++) {
    ptx::mbarrier_init(shared.dout_full(i), 1);
    ptx::mbarrier_init(shared.dout_empty(i), READERS);
  }
  ptx::fence_mbarrier_init();
}

// ---- the producer: one warp

__device__ __forceinline__ void Producer::load(const Work& work) {
  const int steps = work.steps();
  if (steps == 0) return;
  step.restart(work);
  load_keys(work);
#pragma unroll 1
  for (int n = 0; n < steps; n++) {
    load_queries(work);
    load_gradients(work);
    step.advance(work);
  }
}

// ---- a sender: one warp a consumer

__device__ __forceinline__ void Sender::send(const Work& work) {
  const int steps = work.steps();
  step.restart(work);
#pragma unroll 1
  for (int n = 0; n < steps; n++) {
    ptx::barrier_arrive(dq_empty(consumer), SENDING);
    ptx::barrier_sync(dq_full(consumer), SENDING);
    if (leader) add(work, slot_of(all.params, work, step));
    __syncwarp();
    step.advance(work);
  }
  if (leader) ptx::bulk_wait<0>();
}

// ---- a consumer: one warpgroup, 64 keys

// Lines 6 to 18: the keys of one tile, against all rows that see them.
__device__ __forceinline__ void Consumer::attend(const Work& work) {
  const BackwardParams& params = all.params;
  const int steps = work.steps();
  if (steps == 0) {
    store_zeros<HEAD_DIM>(params.dk, params.dk_strides, work);
    store_zeros<HEAD_DIM_V>(params.dv, params.dv_strides, work);
    return;
  }
  KeyGradient dk = {};
  ValueGradient dv = {};
  const Keys keys = start_keys(work);
  step.restart(work);
#pragma unroll 1
  for (int n = 0; n < steps; n++) {
    inner_step(dk, dv, work, keys);
    step.advance(work);
  }
  sync_consumers();  // both are done with K
  store<KBoxes, HEAD_DIM, OWN_COLUMNS>(params.dk, params.dk_strides, dk, work, shared.k(),
                          float(params.forward.softmax_scale) * power_of_two(-keys.ds_exponent));
  store<VBoxes, HEAD_DIM_V, OWN_COLUMNS_V>(params.dv, params.dv_strides, dv, work, shared.v(),
                            DROPOUT ? float(params.forward.dropout_scale) : 1.0f);
  if constexpr (VARLEN) {
    ptx::fence_proxy_async();  // TMA may bring the next keys there
    __syncwarp();
    release(shared.keys_empty());
  }
}

// Lines 10 to 16 for one tile of queries.
__device__ __forceinline__ void Consumer::inner_step(KeyGradient& dk, ValueGradient& dv, const Work& work,
                                                     const Keys& keys) {
  const int stage = step.ring.stage, dout_stage = step.dout_stage();
  const uint32_t parity = step.ring.parity, dout_parity = step.dout_parity();
  const int tile_begin = step.tile * BLOCK_M, row_begin = tile_begin + first_query();
  const uint32_t lses = shared.lse(stage) + first_query() * 4, deltas = shared.delta(dout_stage) + first_query() * 4;
  const Hidden hidden = hidden_pairs(work, tile_begin, row_begin, work.key_begin + first_key());
  bool nonfinite = false;
  Kept kept = {};
  if constexpr (DROPOUT) {  // before the products, which need the registers
    const int first = work.key_begin + first_key() + thread() / 32 * 16;  // of the warp's 16 keys
    draw_kept(kept, all.params, work, step.head, row_begin, first);
  }
  ptx::mbarrier_wait(shared.q_full(stage), parity);
  if (HIDES && hidden.block) {
    ptx::mbarrier_wait(shared.dout_full(dout_stage), dout_parity);
    clear_tile(shared.q(stage), QBoxes::BYTES);
    clear_tile(shared.dout(dout_stage), DoBoxes::BYTES);
    nonfinite = finds_nonfinite(shared.delta(dout_stage));
    ptx::fence_proxy_async();
    sync_consumers();
  }
  Scores s, dp;
  ptx::wgmma_fence();
  multiply_queries(s);
  if constexpr (!DP_LATER) {
    ptx::mbarrier_wait(shared.dout_full(dout_stage), dout_parity);
    multiply_gradients(dp);
  }

  ptx::wgmma_wait<DP_LATER ? 0 : 1>();
  ptx::pin_registers(s);
  Weights p, ds;
  const uint32_t kept_products = shared.dq(number) + thread() * 16;
  if constexpr (KEEPS_PRODUCTS) keep_products(kept_products, s);
  if constexpr (WITH_OPTIONS) {
    const Score<float> scores = scores_of(all.params, work, step.head);
    compute_p_with_options(p, s, kept, {scores, work, keys, lses, kept_products, row_begin, hidden.masked});
  } else {
    compute_p(s, keys, lses);
    if (hidden.masked) apply_mask(s, work, keys, row_begin);
    pack(p, s);
  }
  if constexpr (SHARED_KEYS) {
    store_ds(shared.p(), p, number);
    ptx::fence_proxy_async();
    sync_consumers();  // P of both consumers is there, and both are done with the last dS
  }
  ptx::pin_registers(dv);
  ptx::pin_registers(p);
  if constexpr (DP_LATER) ptx::mbarrier_wait(shared.dout_full(dout_stage), dout_parity);
  ptx::wgmma_fence();
  if constexpr (DP_LATER) multiply_gradients(dp);
  add_to_dv(dv, p);

  ptx::wgmma_wait<DV_FIRST ? 0 : 1>();
  ptx::pin_registers(dp);
  if constexpr (DV_FIRST) {
    ptx::pin_registers(dv);
    ptx::pin_registers(p);
  }
  const DsTerms terms{kept, deltas, DROPOUT ? float(all.params.forward.dropout_scale) : 1.0f,
                      power_of_two(keys.ds_exponent)};
  if constexpr (!KEEPS_PRODUCTS) {
    compute_ds(dp, s, terms);
    if (HIDES_ROWS && hidden.masked) apply_mask(dp, work, keys, row_begin);
  }
  if constexpr (BIAS_GRADIENT) {
    if constexpr (DETERMINISTIC) {
      int turn;
      int32_t* const turns = dbias_turns_of(all.params, work, step, turn);
      begin_turn(turns, turn);
    }
    if constexpr (KEEPS_PRODUCTS) {
      const Score<float> scores = scores_of(all.params, work, step.head);
      const WeightTerms again{scores, work, keys, lses, kept_products, row_begin, hidden.masked};
      compute_ds_of_products(dp, terms, again, all.params, step.head);
    } else {
      add_to_dbias(dp, all.params, work, keys, step.head, row_begin, power_of_two(-keys.ds_exponent));
    }
  }
  pack(ds, dp);
  if constexpr (SHARED_KEYS) {
    ptx::wgmma_wait<0>();
    ptx::pin_registers(dv);
  }
  store_ds(shared.ds(ds_half), ds, number);
  ptx::fence_proxy_async();
  sync_consumers();  // dS of both consumers is there, and both are done with the last but one, or with P
  if constexpr (SHARED_KEYS) release(shared.dout_empty(dout_stage));
  if constexpr (BIAS_GRADIENT && DETERMINISTIC) {
    int turn;
    int32_t* const turns = dbias_turns_of(all.params, work, step, turn);
    end_turn(turns, turn);
  }

  QueryGradient dq;
  ptx::pin_registers(dk);
  ptx::pin_registers(ds);
  ptx::wgmma_fence();
  multiply_keys(dq);
  add_to_dk(dk, ds);
  if constexpr (!SHARED_KEYS) ds_half ^= 1;
  ptx::wgmma_wait<1>();
  if constexpr (!DV_FIRST && !SHARED_KEYS) {
    ptx::pin_registers(dv);
    ptx::pin_registers(p);
  }
  ptx::pin_registers(dq);
  if constexpr (!SHARED_KEYS) release(shared.dout_empty(dout_stage));
  if constexpr (SENDS_DQ) pass_dq(dq);
  else add_dq(dq, work);
#pragma unroll
  for (int piece = 1; piece < DQ_PIECES; piece++) {
    ptx::pin_registers(dq);
    ptx::wgmma_fence();
    multiply_keys(dq, piece);
    ptx::wgmma_wait<0>();
    ptx::pin_registers(dq);
    add_dq(dq, work, piece);
  }
  ptx::wgmma_wait<0>();
  ptx::pin_registers(dk);
  ptx::pin_registers(ds);
  release(shared.q_empty(stage));
  if (HIDES && nonfinite) add_nonfinite(dv, all.params, work, keys, step, first_column(OWN_COLUMNS_V));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) backward_sm90(const __grid_constant__ Sm90BackwardParams all) {
  DYNAMIC_SHARED(memory);
  const Shared shared{ptx::shared_address(memory)};
  if (threadIdx.x == 0) start_barriers(shared);
  __syncthreads();
  const int block = block_of(all.params, block_number(all.params, shared.number()));
  const int warpgroup = ptx::warp_uniform(threadIdx.x / WARPGROUP);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    const int warp = ptx::warp_uniform(threadIdx.x / 32);
    if (warp == 0) {
      Producer producer{all, shared, lane_id() == 0};
      for_each_key_tile(all.params, block, [&](const Work& work) { producer.load(work); });
    } else if (SENDS_DQ && warp <= CONSUMERS) {
      Sender sender{all, shared, warp - 1, lane_id() == 0};
      for_each_key_tile(all.params, block, [&](const Work& work) { sender.send(work); });
    }
  } else {
    ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
    Consumer consumer{all, shared, warpgroup - 1};
    for_each_key_tile(all.params, block, [&](const Work& work) { consumer.attend(work); });
  }
}
