// Everything a running block remembers: its threads (fibers), warps, barriers and the copies that are under way.
#pragma once

#include "emulation/core.cuh"

struct uint3 {
  unsigned int x, y, z;
};
struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace emulation {

struct Block;
struct Fiber;
struct Worker;  // fiber.cuh

// The emulation's own fields inside the 128 opaque bytes of a tensor map; tensor_map.py writes the same struct.
struct TensorMapFields {
  uint64_t magic;
  char* base;
  uint64_t extent[5];  // elements, innermost first
  uint64_t stride[4];  // bytes, of dimensions 1 .. 4
  uint16_t box[5];     // elements
  uint8_t rank, element_bytes;
  uint8_t swizzle;  // 0 none, 1 128 bytes, 2 64 bytes, 3 32 bytes: the numbers that wgmma descriptors use
  uint8_t number;   // how a reduction adds: 0 not at all, 1 f32, 2 f16, 3 bf16, 4 32-bit integer
};
constexpr uint64_t TENSOR_MAP_MAGIC = 0x70616d726f736e65ull;  // "ensormap"
static_assert(sizeof(TensorMapFields) <= 128, "a tensor map has 128 bytes");

// cp.async, one instruction of one thread
struct CopyAsync {
  uint32_t destination;
  const char* source;
  uint32_t bytes, source_bytes;
  bool landed;
  const void* issued;  // Fiber::statement
};
struct CopyAsyncState {
  List<CopyAsync> pending;  // number `finished` onwards
  uint64_t finished, issued;
  List<uint64_t> groups;  // value of `issued` at each commit that is not yet waited for
};

// A bulk or tensor store from shared memory, read from its issue to wait_group.read, visible after wait_group
struct BulkStore {
  TensorMapFields map;  // rank 0: `bytes` consecutive bytes at map.base
  int32_t coordinate[5];
  uint32_t shared, bytes;
  bool reduce, read, written;
  char* snapshot;  // what shared memory held at issue, in shared-memory order
  const void* issued;  // Fiber::statement
};
struct BulkStoreState {
  List<BulkStore> stores;  // committed ones first
  List<uint32_t> groups;   // stores in each committed group, oldest first
  uint32_t committed;      // stores in all of these groups
};

// A load on its way into shared memory, or the mbarrier arrival that follows a thread's earlier cp.async
struct InFlight {
  enum Kind : uint8_t { tensor, bulk, copy_arrival } kind;
  TensorMapFields map;
  int32_t coordinate[5];
  uint32_t shared, bytes, mbarrier;
  const char* source;
  Fiber* fiber;
  uint64_t copies;
  const void* issued;  // Fiber::statement
};

enum class FiberState : uint8_t { ready, blocked, done };

// What the scheduler reads of a fiber at every switch. Those of a block lie together: a fiber's record is on its own
// stack, and the processor would look up as many pages as there are threads.
struct Turn {
  const uint64_t* gate;  // blocked until this counter is no longer `seen`
  uint64_t seen;
  FiberState state;

  bool runnable() const { return state == FiberState::ready || (state == FiberState::blocked && *gate != seen); }
};

// One CUDA thread. It lies near the high end of its own stack, so that the stack pointer finds it.
struct Fiber {
  void* stack_pointer;
  char* stack;
  Block* block;
  uint3 index;
  int linear, warp, lane;
  const char* waits_for;
  int64_t waits_on;  // barrier number or mbarrier address, -1 if there is none
  const void* statement;  // where the last asm statement returns to
  CopyAsyncState copies;
  BulkStoreState bulk;
};
// Records and frames of neighbouring stacks lie at different places of their pages. At equal places, those of a warp
// would share one set of the processor's cache and evict each other.
constexpr size_t FIBER_STEP = 448, FIBER_PLACES = 16;
static_assert(sizeof(Fiber) <= FIBER_STEP, "a fiber's record fits in its place");
inline Fiber* fiber_on(uintptr_t stack) {
  return reinterpret_cast<Fiber*>(stack + STACK_BYTES - (stack / STACK_BYTES % FIBER_PLACES + 1) * FIBER_STEP);
}

// A warp collective in progress: the last lane to arrive computes for all
struct Rendezvous {
  uint64_t generation;
  uint32_t arrived, mask;
  const char* operation;
  void* argument[32];
};
constexpr int RENDEZVOUS = 8;  // different masks of one warp at a time

struct NamedBarrier {
  uint64_t generation;
  int arrived, expected;  // expected -1: every live thread
};

constexpr uint32_t MAX_MBARRIERS = 512;  // of a block
struct MBarrier {
  uint64_t phase;
  uint32_t address;
  int count, pending;
  int64_t bytes;
};

// Accumulators in flight hold poison in the registers; the true values live here, 16 x n of one warp
struct Accumulator {
  float* home;  // lane 0's registers: the key
  float* lane[32];
  float* value;
  int n, uses;
};
struct WgmmaOperation {
  int n;
  int element, b_element;
  bool a_in_registers, a_transposed, b_transposed;
  uint64_t a_descriptor, b_descriptor, hash;
  float* accumulator;
  const uint32_t* a[32];
  uint32_t a_value[32][4];
  const void* issued;  // Fiber::statement
};
// Registers that wgmma reads, as the last wgmma.fence saw them
struct FencedRegisters {
  const uint32_t* lane[32];
  int words;
  uint64_t hash;
};
struct WgmmaState {
  List<WgmmaOperation> operations;  // committed ones first
  List<uint32_t> groups;
  uint32_t committed;
  List<Accumulator> accumulators;
  List<FencedRegisters> registers;
  bool fenced;
  const void* fence;  // the last wgmma.fence: Fiber::statement
  uint64_t issued;
};
// What the first warp of a warpgroup issued: its other warps must issue the same
struct WgmmaIssue {
  uint64_t a_descriptor, b_descriptor;
  int n;
};

// When lanes of a warp know what other lanes of it did (order.cuh)
struct LaneOrder {
  uint32_t time, together;  // all lanes know what any did until then
  uint32_t released[32];    // what each did until then is known to those who have waited for it
  uint32_t known[32][32];   // known[b][a]: lane b knows what lane a did until then
};
// Bytes of global memory that a thread stored, at a time of its warp, with no fence to the async proxy since
struct UnfencedStore {
  const char* at;
  uint32_t bytes, time;
  int thread;
};
constexpr uint32_t MAX_UNFENCED = 4096;  // that are remembered, of a buffer

// Who wrote and read each four of 16 bytes of shared memory last
struct alignas(64) SharedUnit {
  uint64_t wrote[4], read[4];
};
// time: what was noted until then is of earlier blocks. any: of each line, whether threads of this block have touched it.
constexpr uint32_t TOUCHED_LINE = 512;
struct TouchedMemory {
  uint32_t time;
  bool any[MAX_SHARED_BYTES / TOUCHED_LINE];
  SharedUnit unit[MAX_SHARED_BYTES / 16];
};

struct Warp {
  Rendezvous rendezvous[RENDEZVOUS];
  uint32_t lanes;  // lanes that exist
  int registers;   // that each of them has, as far as setmaxnreg goes
  WgmmaState wgmma;
};

struct Fault {
  char kind[24];
  uint32_t block[3];
  int32_t thread;  // -1: no single thread
  int32_t buffer;  // index in the launch's buffers, -1: none
  uint64_t address;
  // Offsets in the module: what follows each call that led to the fault, innermost first, and what follows the
  // instruction whose copy, store or product it is about (0: none).
  uint32_t frame_count;
  uint64_t frames[MAX_FRAMES], issued;
  char text[1600];
};

struct BufferRange {
  uint64_t begin, end;          // the bytes a kernel may touch
  uint64_t map_begin, map_end;  // with the inaccessible pages on both sides
};

// Memory that the caller maps once for each worker and lends to every launch
struct Arena {
  char* stacks;        // MAX_THREADS stacks, aligned to STACK_BYTES
  char* shared_end;    // first inaccessible byte after the window of dynamic shared memory
  char* shared_begin;  // first accessible byte of that window
  char* async_view;    // MAX_SHARED_BYTES rounded up to 1024
  TouchedMemory* touched;
};

// Mirrored by runtime.py
struct Request {
  uint32_t grid[3], block[3];
  uint32_t shared_bytes;
  Delivery delivery;
  Schedule schedule;
  Arithmetic arithmetic;
  uint32_t workers;
  uint32_t argument_count, buffer_count;
  uint64_t seed;
  double limit_seconds;
  void* const* arguments;
  const uint64_t* argument_bytes;
  const BufferRange* buffers;
  const Arena* arenas;
  Fault* fault;
  uint64_t switches;
};

struct Block {
  Worker* worker;
  const Request* request;
  uint3 index;
  dim3 dim, grid;
  int threads, live, warp_count;
  Fiber* fiber[MAX_THREADS];
  Turn turn[MAX_THREADS];
  Fiber* current;
  Warp warp[MAX_WARPS];
  NamedBarrier barrier[16];
  int votes;                         // of __syncthreads_count
  int free_registers;                // for setmaxnreg.inc
  uint64_t registers_given;          // how often setmaxnreg.dec gave some
  MBarrier mbarrier[MAX_MBARRIERS];  // never moved: waiting threads watch their phases
  uint32_t mbarrier_count;
  bool mbarrier_init_unfenced;
  List<InFlight> in_flight;
  List<WgmmaIssue> issues[MAX_WARPS / 4];
  // scheduling
  Random random;
  uint32_t delivery_odds;  // of delivery random: one load in so many switches, 0: only if no thread can run
  uint16_t thread_order[MAX_THREADS], warp_order[MAX_WARPS];
  int position;
  uint64_t deliveries;
  // shared memory: what threads see, what the async proxy sees, and who wrote 16 bytes since the last fence
  char* shared;
  char* async_view;
  uint32_t shared_bytes;
  int16_t* writer;  // -1: unknown
  List<uint32_t> written[MAX_THREADS];
  TouchedMemory* touched;
  LaneOrder order[MAX_WARPS];
  List<UnfencedStore>* unfenced;  // of each buffer
  bool stores_unfenced;           // whether there are any
};

}  // namespace emulation
