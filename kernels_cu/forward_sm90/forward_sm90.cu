// Attention forward for Hopper (sm_90a) on warpgroup products, after FlashAttention-3 (Shah et al., arXiv 2407.08608):
// warp specialisation, a producer that only loads and consumers that only multiply (section 3.1); ping-pong scheduling
// of the consumers (3.1); intra-warpgroup overlap of a product with the softmax of the next tile (3.2).
//
//      warpgroup 0                     warpgroups 1 .. CONSUMERS, 64 rows each
//    +----------------------+        +------------------------------------------------------+
//    | warp 0: the producer |        | S = Q K(n)              wgmma, both in shared memory |
//    |  which tile is next  |--tile->| O += P V(n + 1)         wgmma, P in registers        |
//    |  Q, K(n), V(n) by TMA|--full->| P = softmax(S)          meanwhile                    |
//    |  into a free stage   |<-empty-| O / l -> shared memory -> TMA                        |
//    +----------------------+        +------------------------------------------------------+
//      24 or 32 registers              240 registers (two consumers) or 160 (three)
//
// With 8-bit elements the other warps of warpgroup 0 transpose V (forward_sm90/transposer.cuh), as in section 3.3;
// weights are packed at 2^8 times their size (section 3.3 scales by blocks, this kernel by heads); and P V of each tile
// is summed apart, then added to O.
//
// One block for each multiprocessor runs for the whole launch and takes one tile of rows after another (schedule.cuh).
// This file is the outline: run, load, attend and the steps of the main loop. What they call is in producer.cuh and
// consumer.cuh. docs/hopper.md says what each barrier is for.
#define PTX_WGMMA_STEP (BLOCK_N % 32 ? 16 : 32)  // head dims are padded to multiples of 32
#include "forward_sm90/consumer.cuh"
#include "forward_sm90/producer.cuh"
#include "forward_sm90/transposer.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 24 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 240 : 160;

static_assert(sizeof(ELEMENT) == sizeof(KV_ELEMENT) && sizeof(ELEMENT) <= 2, "products are of 16 or 8 bits");
static_assert(STAGES >= 2, "the keys of the next tile land while those of this one are multiplied");
static_assert(!DROPOUT || !FP8, "weights of 8 bits are not dropped");
static_assert((PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) * WARPGROUP <= 65536 / THREADS / 8 * 8 * THREADS,
              "a launch gives a thread a multiple of 8, and more than it gives there is not");

// `full` barriers take one arrival, the producer's, and the bytes that it announces; `empty` ones take an arrival of
// each warp that reads.
DEVICE void start_barriers(const Shared& shared) {
  constexpr int READERS = 4 * CONSUMERS;
  for (int i = 0; i < CONSUMERS; i++) {
    ptx::mbarrier_init(shared.q_full(i), 1);
    ptx::mbarrier_init(shared.q_empty(i), 4);
  }
  for (int i = 0; i < STAGES; i++) {
    ptx::mbarrier_init(shared.k_full(i), 1);
    ptx::mbarrier_init(shared.k_empty(i), READERS);
    ptx::mbarrier_init(shared.v_full(i), FP8 ? TRANSPOSERS : 1);
    ptx::mbarrier_init(shared.v_empty(i), READERS);
  }
  for (int i = 0; i < SLOTS; i++) {
    ptx::mbarrier_init(shared.tile_full(i), 1);
    ptx::mbarrier_init(shared.tile_empty(i), READERS);
  }
  if constexpr (FP8) {
    ptx::mbarrier_init(shared.v_arrived(), 1);
    ptx::mbarrier_init(shared.v_taken(), TRANSPOSERS);
  }
  ptx::fence_mbarrier_init();
}

// ---- the producer: one warp

// Loads every tile of the block, and announces the end.
__device__ __forceinline__ void Producer::run() {
  TileSource source;
  while (source.announce(shared, all.schedule, leader)) {
    const int drawn = source.draw(all.schedule, leader);
    Work work = work_of(all.params, all.schedule, source.tile);
    for_each_row_tile(all, work, [&](const Work& rows) {
      if (rows.sees_keys()) load(rows);
    });
    source.take(drawn);
  }
  if constexpr (FP8) end_values();
}

// Keys come from the last tile to the first. The consumers need K one tile ahead of V.
__device__ __forceinline__ void Producer::load(const Work& work) {
  int n = work.last_tile();
  load_keys(work, n);
  load_queries(work);
#pragma unroll 1
  for (int next = work.tile_before(n); next >= 0; next = work.tile_before(n)) {
    load_keys(work, next);
    load_values(work, n);
    n = next;
  }
  load_values(work, n);
}

// ---- a consumer: one warpgroup, 64 rows of each tile

// Attends to every tile of the block, until the producer says that there are no more.
__device__ __forceinline__ void Consumer::run() {
  TileSink tiles;
  if constexpr (PINGPONG) {
    pingpong[0] = pingpong_barrier(number);
    pingpong[1] = pingpong_barrier(number + 1 == CONSUMERS ? 0 : number + 1);
    ptx::pin_registers(pingpong);  // in the threads' own registers: uniform ones are few
  }
  if (PINGPONG && number == CONSUMERS - 1) pingpong_pass();
  for (int tile = tiles.next(shared); tile != TileSource::NO_TILE; tile = tiles.next(shared)) {
    Work work = work_of(all.params, all.schedule, tile);
    for_each_row_tile(all, work, [&](const Work& rows) { attend(rows); });
  }
  if (PINGPONG && number == 0) pingpong_wait();  // passed on by the last one; no other waits
  if (threadIdx.x % WARPGROUP == 0) ptx::bulk_wait<0>();
}

// Multiplies one tile of rows with all keys that they see.
__device__ __forceinline__ void Consumer::attend(const Work& work) {
  if (!work.sees_keys()) {
    store_nothing(all.params, work, number);
    return;
  }
  const int first_row = work.row_begin + number * ROWS + threadIdx.x % WARPGROUP / 32 * 16 + lane_id() / 4;
  const Rows rows =
      rows_of(all.params, work.mask, work.sequence, work.head, work.kv_head, first_row, work.seqlen_q - 1);
  Registers r;
#pragma unroll
  for (int i = 0; i < DIM_V / 2; i++) r.o[i] = 0.0f;
  r.correction[0] = r.correction[1] = 1.0f;
  first_scores(r, work, rows);
  mainloop(r, work, rows);
  release(shared.q_empty(number));
  last_values(r);
  store(all, work, shared, number, rows, r.softmax, r.o);
}

// The other tiles of keys, from the last to the first.
__device__ __forceinline__ void Consumer::mainloop(Registers& r, const Work& work, const Rows& rows) {
  uint32_t whole[2];
  find_whole_tiles(whole, work);
  // Places of lists are found ahead. Without lists ptxas saves an instruction a step if the next place is found last.
#pragma unroll 1
  for (int n = work.tile_before(work.last_tile()), next; n >= 0; n = BLOCK_MASK ? next : n - 1) {
    next = BLOCK_MASK ? work.tile_before(n) : -1;
    const int first_key = work.first_key(n);
    const bool masked = needs_mask(whole, work, n, first_key);
    if constexpr (VALUES_FIRST) mainloop_step_apart(r, rows, first_key, masked, work.is_full(n));
    else mainloop_step(r, rows, BLOCK_MASK ? next >= 0 : n > 0, first_key, masked, work.is_full(n));
  }
}

// Intra-warpgroup overlap: the scores and weights of tile n, while the tensor cores multiply the weights of tile n + 1
// with its values. A consumer issues its products in its turn of the ping-pong, so that its softmax runs beside the
// products of another.
__device__ __forceinline__ void Consumer::mainloop_step(Registers& r, const Rows& rows, bool more, int first_key,
                                                         bool masked, bool full) {
  if (PINGPONG) pingpong_wait();
  ptx::pin_registers(r.o);
  ptx::pin_registers(r.p);
  ptx::wgmma_fence();
  multiply_keys(r.s);
  if (EARLY_RESCALE) {
    rescale(r.o, r.correction);
    ptx::pin_registers(r.o);
  }
  wait_for_values();
  ptx::wgmma_fence();  // without it, ptxas puts one in (C7519)
  Sums sums;
  if constexpr (FP8) multiply_piece(r, sums, 0);
  else multiply_values(r.o, r.p);
  if (PINGPONG) pingpong_pass();

  Kept kept;
  if constexpr (DROPOUT) draw_kept(kept, rows, first_key);
  BiasTile bias;
  if constexpr (BIAS) load_bias<false>(bias, rows, first_key);
  ptx::wgmma_wait<1>();
  ptx::pin_registers(r.s);
  release_keys();
  score<BLOCK_MASK>(r.s, rows, bias, first_key, full);
  // A uniform branch in one loop: a second loop for masks would make a compile half as long again.
  if (MASKS && masked) apply_mask(r.s, rows, first_key);
  float correction[2];
  softmax_tile<false>(r.s, r.softmax, correction, rows.exponents);
  if constexpr (DROPOUT) drop_weights(r.s, kept);

  // The next step needs these keys. Waiting here, and not where they are used, ends the basic block: without that,
  // ptxas moves the wait for O above the exponentials, and the softmax no longer runs beside the product.
  ptx::pin_registers(r.s);
  if (more) wait_for_keys();
  ptx::wgmma_wait<0>();
  ptx::pin_registers(r.o);
  ptx::pin_registers(r.p);
  release_values();
  pack(r.p, r.s);
  if constexpr (FP8) {
    ptx::pin_registers(sums);
    add_piece(r.o, sums, r.correction, 0);
  }
  r.correction[0] = correction[0];
  r.correction[1] = correction[1];
  if (!FP8 && !EARLY_RESCALE) rescale(r.o, r.correction);
}

// If registers hold either scores or sums: first the values of tile n + 1, then the scores of tile n. The softmax runs
// only beside other consumers' products.
__device__ __forceinline__ void Consumer::mainloop_step_apart(Registers& r, const Rows& rows, int first_key, bool masked,
                                                               bool full) {
  add_values(r);
  wait_for_keys();
  ptx::wgmma_fence();
  multiply_keys(r.s);
  BiasTile bias;
  if constexpr (BIAS) load_bias<false>(bias, rows, first_key);
  ptx::wgmma_wait<0>();
  ptx::pin_registers(r.s);
  release_keys();
  score<BLOCK_MASK>(r.s, rows, bias, first_key, full);
  if (MASKS && masked) apply_mask(r.s, rows, first_key);
  softmax_tile<false>(r.s, r.softmax, r.correction, rows.exponents);
  pack(r.p, r.s);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward_sm90(const __grid_constant__ Sm90Params all) {
  DYNAMIC_SHARED(memory);
  const Shared shared{ptx::shared_address(memory)};
  if (threadIdx.x == 0) start_barriers(shared);
  __syncthreads();
  const int warpgroup = ptx::warp_uniform(threadIdx.x / WARPGROUP);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    const int warp = ptx::warp_uniform(threadIdx.x / 32);
    if (warp == 0) Producer{all, shared, lane_id() == 0}.run();
    else if constexpr (FP8) Transposer{shared, warp - 1}.run();
  } else {
    ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
    Consumer{all, shared, warpgroup - 1}.run();
  }
}
