// Attention of many new rows to cached keys on Hopper (sm_90a), on warpgroup products: speculative decoding, short prefill.
//
// decode/decode_mma.cu packs rows and splits keys, and so does this kernel: decode_plan and decode_combine serve both. But a
// warp of mma.sync multiplies 16 rows, so that 64 packed rows read each key four times from shared memory. Here a wgmma
// has 64 rows, and reads it once:
//
//      one or two warpgroups: 64 packed rows each               the last one: one warp, the producer
//    +-------------------------------------------------+      +------------------------------------+
//    | S = Q K(n)      wgmma, Q in registers           |<-full-| K(n), V(n) by TMA into a free stage |
//    | P = softmax(S)                                  |      |                                    |
//    | O += P V(n)     wgmma, P in registers           |-empty>| pages are looked up 32 parts ahead |
//    +-------------------------------------------------+      +------------------------------------+
//
// Memory sets the time, so the stages hold as much as fits (decode_sm90/layout.cuh), and nothing overlaps within a
// warpgroup. Both warpgroups multiply the same stages. Over an 8-bit cache a warpgroup between producer and consumers widens
// each tile once (decode_sm90/widener.cuh).
#define PTX_WGMMA_STEP 32  // head dims are padded to multiples of it
#include "decode_sm90/consumer.cuh"
#include "decode_sm90/producer.cuh"
#include "decode_sm90/widener.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int LOADER = WARPS / 4 - 1;  // the last warpgroup
// Registers are moved only with more than two warpgroups; fewer have what they need.
constexpr bool FULL_HOUSE = NARROW && CONSUMERS == 2;
constexpr int PRODUCER_REGISTERS = FULL_HOUSE ? 40 : 56, WIDENER_REGISTERS = 64, CONSUMER_REGISTERS = FULL_HOUSE ? 200 : 224;
static_assert((PRODUCER_REGISTERS + NARROW * WIDENER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) * WARPGROUP <= 65536,
              "registers there are");

// `full` barriers take one arrival, the producer's, and the bytes that it announces, or one of each warp that widens;
// `empty` ones an arrival of each warp that reads.
DEVICE void start_barriers(const Shared& shared) {
  for (int i = 0; i < DEPTH; i++) {
    ptx::mbarrier_init(shared.full(i), NARROW ? 4 : 1);
    ptx::mbarrier_init(shared.empty(i), 4 * CONSUMERS);
  }
  for (int i = 0; i < STAGES && NARROW; i++) {
    ptx::mbarrier_init(shared.arrived(i), 1);
    ptx::mbarrier_init(shared.taken(i), 4);
  }
  ptx::store_shared(shared.found(), 0);
  ptx::fence_mbarrier_init();
}

// Multiplies the piece's keys with the entry's rows. slot: as in store_rows.
__device__ __forceinline__ void Consumer::attend(const Entry& entry, int kv_head, const Piece& piece, int slot) {
  const Rows rows = rows_of(all.params, entry, kv_head, first_row());
  const SeenKeys keys = seen_keys(entry.mask, entry.row_begin, entry.row_end);
  Output o = {};
  SoftmaxRow softmax[2];
  start(softmax, rows.exponents);
  Queries q;
  load_queries(q, entry, kv_head);
  bool any_masked = false;
#pragma unroll 1
  for (int n = piece.first; n < piece.last; n++) {
    const int first_key = entry.tiles.at(n) * BLOCK_N;
    const bool masked = !all_visible(entry, first_key);
    step(o, softmax, q, rows, keys, first_key, masked);
    any_masked |= masked;
  }
  // Found by any thread, in this piece or an earlier one of the block.
  if (any_masked && ptx::load_shared(shared.found()) != 0) {
    const CacheSource source = cache_source(all.params, entry.sequence, kv_head);
#pragma unroll 1
    for (int n = piece.first; n < piece.last; n++) {
      const int first_key = entry.tiles.at(n) * BLOCK_N;
      if (!all_visible(entry, first_key)) add_nonfinite(o, source, keys, rows, first_key);
    }
  }
  store_rows(all.params, entry, kv_head, slot, first_row(), o, softmax, rows.exponents);
}

// One tile of keys.
__device__ __forceinline__ void Consumer::step(Output& o, SoftmaxRow (&softmax)[2], Queries& q, const Rows& rows,
                                               const SeenKeys& keys, int first_key, bool masked) {
  ptx::mbarrier_wait(shared.full(ring.stage), ring.parity);
  Scores s;
  ptx::pin_registers(q);
  ptx::wgmma_fence();
  multiply_keys(s, q);
  if (masked) clear_tile(keys, first_key);  // beside the product
  ptx::wgmma_wait<0>();
  ptx::pin_registers(s);
  score(s, rows, first_key);
  if (masked) apply_mask(s, rows, first_key);
  float correction[2];
  softmax_tile(s, softmax, correction, rows.exponents);
  rescale(o, correction);
  Weights p;
  pack(p, s);
  ptx::pin_registers(o);
  ptx::pin_registers(p);
  ptx::wgmma_fence();
  multiply_values(o, p);
  ptx::wgmma_wait<0>();
  ptx::pin_registers(o);
  ptx::pin_registers(p);
  release();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_sm90(const __grid_constant__ Sm90DecodeParams all) {
  DYNAMIC_SHARED(memory);
  const Shared shared{ptx::shared_address(memory)};
  if (threadIdx.x == 0) start_barriers(shared);
  __syncthreads();
  const int warpgroup = ptx::warp_uniform(threadIdx.x / WARPGROUP);
  if (warpgroup == LOADER) {
    if constexpr (LOADER > 1) ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (ptx::warp_uniform(threadIdx.x / 32) != 4 * LOADER) return;
    Producer producer{all, shared};
    for_each_piece(
        all.params,
        [&](const Entry& entry, int kv_head, const Piece& piece, int) { producer.load(entry, kv_head, piece); },
        [](const Entry&, int, int64_t) {});
  } else if (NARROW && warpgroup == CONSUMERS) {
    if constexpr (NARROW) ptx::setmaxnreg_dec<WIDENER_REGISTERS>();
    Widener widener{shared};
    for_each_piece(
        all.params, [&](const Entry&, int, const Piece& piece, int) { if constexpr (NARROW) widener.widen_tiles(piece); },
        [](const Entry&, int, int64_t) {});
  } else {
    if constexpr (LOADER > 1) ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
    Consumer consumer{all, shared, warpgroup};
    for_each_piece(
        all.params,
        [&](const Entry& entry, int kv_head, const Piece& piece, int slot) { consumer.attend(entry, kv_head, piece, slot); },
        [&](const Entry& entry, int kv_head, int64_t packed_end) {
          write_broken<CONSUMER_THREADS>(all.params, entry, kv_head, packed_end);
        });
  }
}
