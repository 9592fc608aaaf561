// Attention forward for Hopper (sm_90a) on warpgroup products, with what FlashAttention-3 does at its heart (Shah et
// al., arXiv 2407.08608, sections 3.1 and 3.2): a warp that only loads, warpgroups that only multiply, products that
// run while the softmax does.
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
// Of 8-bit elements V comes transposed, by hopper/transpose_v.cu, which runs before; weights are packed at 2^8 times their
// size (section 3.3 there scales by blocks, here by heads); and P V of each tile is summed apart, then added to O.
//
// One block a multiprocessor stays for the whole launch and takes tiles of rows as it gets done (hopper/schedule.cuh).
// The outline of the work is Producer::run and Producer::load, Consumer::attend and Consumer::step. docs/hopper.md
// tells what each barrier is for.
#include "hopper/consumer.cuh"
#include "hopper/producer.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int PRODUCER_REGISTERS = CONSUMERS == 2 ? 24 : 32;
constexpr int CONSUMER_REGISTERS = CONSUMERS == 2 ? 240 : 160;

static_assert(sizeof(ELEMENT) == sizeof(KV_ELEMENT) && sizeof(ELEMENT) <= 2, "products are of 16 or 8 bits");
static_assert(STAGES >= 2, "the keys of the next tile land while those of this one are multiplied");
static_assert(!BIAS && !DROPOUT, "forward_mma has these options");
static_assert((PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS) * WARPGROUP <= 65536, "registers there are");

// `full` barriers take one arrival, the producer's, and the bytes that it announces; `empty` ones an arrival of each
// warp that reads.
DEVICE void start_barriers(const Shared& shared) {
  constexpr int READERS = 4 * CONSUMERS;
  for (int i = 0; i < CONSUMERS; i++) {
    ptx::mbarrier_init(shared.q_full(i), 1);
    ptx::mbarrier_init(shared.q_empty(i), 4);
  }
  for (int i = 0; i < STAGES; i++) {
    ptx::mbarrier_init(shared.k_full(i), 1);
    ptx::mbarrier_init(shared.k_empty(i), READERS);
    ptx::mbarrier_init(shared.v_full(i), 1);
    ptx::mbarrier_init(shared.v_empty(i), READERS);
  }
  for (int i = 0; i < SLOTS; i++) {
    ptx::mbarrier_init(shared.tile_full(i), 1);
    ptx::mbarrier_init(shared.tile_empty(i), READERS);
  }
  ptx::fence_mbarrier_init();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) forward_sm90(const __grid_constant__ Sm90Params all) {
  DYNAMIC_SHARED(memory);
  const Shared shared{ptx::shared_address(memory)};
  if (threadIdx.x == 0) start_barriers(shared);
  __syncthreads();
  const int warpgroup = ptx::warp_uniform(threadIdx.x / WARPGROUP);
  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (ptx::warp_uniform(threadIdx.x / 32) == 0) Producer{all, shared, lane_id() == 0}.run();
  } else {
    ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
    Consumer{all, shared, warpgroup - 1}.run();
  }
}
