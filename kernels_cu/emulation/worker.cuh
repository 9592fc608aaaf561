// A worker is a host thread: it takes the next block of the grid, makes a fiber of each of the block's threads and runs
// them to their end. CUDA promises no order of blocks, so the seed picks one: a block may wait only for a block that has
// surely started, as one that drew a lower number from a counter.
#pragma once

#include <link.h>
#include <ucontext.h>

#include "emulation/delivery.cuh"
#include "emulation/passed_words.cuh"

namespace emulation {

constexpr uint32_t MAX_WORKERS = 16;

// The order in which blocks start: upwards for seed 0, downwards for seed 1, else steps of a size that shares no factor
// with their count, which meet each block once and need no list of them.
struct BlockOrder {
  uint64_t blocks, first, step;

  void choose(uint64_t count, uint64_t seed) {
    blocks = count;
    first = seed == 1 ? count - 1 : 0;
    step = seed == 1 ? count - 1 : 1;
    if (seed < 2) return;
    Random random;
    random.seed(seed, count);
    first = random.next() % count;
    step = 1 + random.next() % count;
    while (common_factor(step, count) != 1) step++;
  }
  uint64_t block(uint64_t place) const { return uint64_t((first + static_cast<unsigned __int128>(place) * step) % blocks); }

 private:
  static uint64_t common_factor(uint64_t a, uint64_t b) { return b ? common_factor(b, a % b) : a; }
};

struct Launch {
  Request* request;
  void (*call)(void* kernel, void* const* arguments);
  void* kernel;
  uint64_t blocks;
  BlockOrder order;
  uint64_t next_place;    // atomic: in that order
  uint64_t failed_place;  // atomic: the first that failed, blocks after it need not run
  uint32_t finished;      // workers, under lock
  pthread_mutex_t lock;
  pthread_cond_t done;
  uint32_t worker_count;
  PassedWords passed;
  Worker worker[MAX_WORKERS];
};

// The launch that signal handlers serve; launches of one process come one after the other.
inline Launch* active_launch = nullptr;

// ---- one thread of a block
inline void fiber_main() {
  Fiber& fiber = self();
  Block& block = *fiber.block;
  Launch& launch = *block.worker->launch;
  launch.call(launch.kernel, launch.request->arguments);
  check_thread_end(fiber);
  turn_of(fiber).state = FiberState::done;
  block.live--;
  if (block.barrier[0].arrived && block.barrier[0].expected < 0) release_if_complete(block, 0);
  give_way(block);
  abort();
}

template <class T>
inline void shuffle_order(Random& random, T* order, int n, uint64_t seed) {
  for (int i = 0; i < n; i++) order[i] = T(seed == 1 ? n - 1 - i : i);
  if (seed > 1)
    for (int i = n - 1; i > 0; i--) exchange(order[i], order[random.below(i + 1)]);
}

inline void start_threads(Block& block) {
  for (int i = 0; i < block.threads; i++) {
    char* stack = block.worker->arena->stacks + size_t(i) * STACK_BYTES;
    Fiber& f = *fiber_on(reinterpret_cast<uintptr_t>(stack));
    memset(&f, 0, sizeof f);
    f.stack = stack;
    f.block = &block;
    f.index = {i % block.dim.x, i / block.dim.x % block.dim.y, i / (block.dim.x * block.dim.y)};
    f.linear = i;
    f.warp = i / 32;
    f.lane = i % 32;
    block.warp[f.warp].lanes |= 1u << f.lane;
    block.fiber[i] = &f;
    block.turn[i].state = FiberState::ready;
    prepare_context(f, fiber_main);
  }
}

// ---- one block
inline void start_block(Block& block, uint64_t number) {
  const Request& request = *block.request;
  uint64_t gx = request.grid[0], gy = request.grid[1];
  block.index = {unsigned(number % gx), unsigned(number / gx % gy), unsigned(number / (gx * gy))};
  block.dim = dim3(request.block[0], request.block[1], request.block[2]);
  block.grid = dim3(request.grid[0], request.grid[1], request.grid[2]);
  block.threads = block.live = int(block.dim.x * block.dim.y * block.dim.z);
  block.warp_count = (block.threads + 31) / 32;
  block.current = nullptr;
  block.votes = 0;
  blame_running(block);
  block.mbarrier_count = 0;
  block.mbarrier_init_unfenced = false;
  memset(block.barrier, 0, sizeof block.barrier);
  memset(block.warp, 0, sizeof block.warp);
  const int most = 65536 / (32 * block.warp_count) / 8 * 8;  // of a thread, if it is the only block of a multiprocessor
  for (int i = 0; i < block.warp_count; i++) block.warp[i].registers = lower(most, 255);
  block.free_registers = 0;  // registers that a launch leaves over do not belong to the block
  block.registers_given = 0;
  block.random.seed(request.seed, number);
  shuffle_order(block.random, block.thread_order, block.threads, request.seed);
  shuffle_order(block.random, block.warp_order, block.warp_count, request.seed);
  constexpr uint32_t ODDS[] = {16, 256, 0};
  block.delivery_odds = ODDS[block.random.below(3)];
  block.position = block.threads - 1;
  start_shared(block);
  start_threads(block);
}

inline void run_block(Worker& worker, uint64_t number) {
  Block& block = *worker.block;
  start_block(block, number);
  worker.running = 1;
  resume(*pick(block));
  worker.running = 0;
  if (worker.failed) return;
  if (const char* where = broken_canary(block))
    report(block, kind::out_of_bounds, "a thread wrote %s of the %u bytes of dynamic shared memory", where,
           block.shared_bytes);
  else check_block_end(block);
}

// ---- signals: a bad address or a loop that never yields ends the block, not the process
inline void on_signal(int signal, siginfo_t* info, void* context);

struct SignalActions {
  static constexpr int COUNT = 5;
  static constexpr int signals[COUNT] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM};
  struct sigaction before[COUNT];

  void install() {
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // reading a broken stack faults inside the handler
    for (int i = 0; i < COUNT; i++) sigaction(signals[i], &action, &before[i]);
  }
  void restore() {
    for (int i = 0; i < COUNT; i++) sigaction(signals[i], &before[i], nullptr);
  }
};
inline SignalActions signal_actions;

// The instruction that a signal interrupted, null if that is not known.
inline const void* interrupted_by_signal(const void* context) {
  [[maybe_unused]] const auto& registers = static_cast<const ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
  return reinterpret_cast<const void*>(registers.gregs[REG_RIP]);
#elif defined(__aarch64__)
  return reinterpret_cast<const void*>(registers.pc);
#else
  return nullptr;
#endif
}

__attribute__((format(printf, 4, 5))) inline void report_signal(Worker& worker, const void* context, const char* what,
                                                                const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  blame_running(*worker.block);
  describe_fault(worker, what, worker.block->current, format, arguments, interrupted_by_signal(context));
  va_end(arguments);
}

inline void report_address(Worker& worker, const void* context, const char* address) {
  const Fiber* fiber = worker.block->current;
  const Arena& arena = *worker.arena;
  constexpr ptrdiff_t NEAR = 16 << 20;
  if (fiber && address >= fiber->stack && address < fiber->stack + STACK_GUARD) {
    report_signal(worker, context, kind::stack_overflow, "the thread's stack of %zu bytes is full", STACK_BYTES);
  } else if (address > arena.shared_begin - NEAR && address < arena.shared_end + NEAR) {
    report_signal(worker, context, kind::out_of_bounds, "access at byte %td of %u bytes of dynamic shared memory",
                  address - worker.block->shared, worker.block->shared_bytes);
  } else {
    report_signal(worker, context, kind::out_of_bounds, "access");
    worker.fault.address = reinterpret_cast<uintptr_t>(address);
  }
}

inline void on_signal(int signal, siginfo_t* info, void* context) {
  Launch* launch = active_launch;
  for (uint32_t i = 0; launch && i < launch->worker_count; i++) {
    Worker& worker = launch->worker[i];
    if (!worker.running || !pthread_equal(worker.thread, pthread_self())) continue;
    if (worker.unwinding) siglongjmp(worker.unwound, 1);
    if (signal == SIGVTALRM)
      report_signal(worker, context, kind::time_limit,
                    "the launch ran longer than its %g s in a loop that waits for nothing known",
                    launch->request->limit_seconds);
    else if (signal == SIGFPE) report_signal(worker, context, kind::trap, "integer division by zero");
    else if (signal == SIGILL)
      report_signal(worker, context, kind::trap, "the compiler found this path to be undefined (a trap instruction)");
    else report_address(worker, context, static_cast<const char*>(info->si_addr));
    siglongjmp(worker.escape, 1);
  }
  if (signal != SIGVTALRM) signal_actions.restore();  // not ours: the handlers that were installed before get it
}

// ---- one worker
// The thread-local block of this shared object holds the static __shared__ variables and nothing else.
static thread_local volatile char static_shared_anchor;

inline int find_static_shared(struct dl_phdr_info* info, size_t, void* argument) {
  uintptr_t here = reinterpret_cast<uintptr_t>(&find_static_shared);
  bool mine = false;
  const ElfW(Phdr)* tls = nullptr;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr) & h = info->dlpi_phdr[i];
    if (h.p_type == PT_LOAD)
      mine |= here >= info->dlpi_addr + h.p_vaddr && here < info->dlpi_addr + h.p_vaddr + h.p_memsz;
    if (h.p_type == PT_TLS) tls = &h;
  }
  if (!mine) return 0;
  Worker& worker = *static_cast<Worker*>(argument);
  if (tls && info->dlpi_tls_data) {
    worker.static_begin = static_cast<char*>(info->dlpi_tls_data);
    worker.static_end = worker.static_begin + tls->p_memsz;
  }
  return 1;
}

inline void release_block(Block& block) {
  block.in_flight.release();
  for (List<WgmmaIssue>& list : block.issues) list.release();
  for (List<uint32_t>& list : block.written) list.release();
  for (uint32_t i = 0; i < block.request->buffer_count; i++) block.unfenced[i].release();
  free(block.unfenced);
  free(block.writer);
  free(&block);
}

inline Block* make_block(Worker& worker) {
  Block* block = static_cast<Block*>(calloc(1, sizeof(Block)));
  if (!block) abort();
  block->worker = &worker;
  block->request = worker.launch->request;
  block->writer = static_cast<int16_t*>(malloc((block->request->shared_bytes / 16 + 1) * sizeof(int16_t)));
  block->unfenced = static_cast<List<UnfencedStore>*>(calloc(block->request->buffer_count + 1, sizeof(List<UnfencedStore>)));
  return block;
}

inline void note_failure(Launch& launch, uint64_t place) {
  uint64_t first = __atomic_load_n(&launch.failed_place, __ATOMIC_SEQ_CST);
  while (place < first && !__atomic_compare_exchange_n(&launch.failed_place, &first, place, false, __ATOMIC_SEQ_CST,
                                                       __ATOMIC_SEQ_CST)) {}
}

inline void* worker_main(void* argument) {
  Worker& worker = *static_cast<Worker*>(argument);
  Launch& launch = *worker.launch;
  char* signal_stack = static_cast<char*>(malloc(1 << 16));
  stack_t alternative{}, before{};
  alternative.ss_sp = signal_stack;
  alternative.ss_size = 1 << 16;
  sigaltstack(&alternative, &before);
  static_shared_anchor = 0;
  dl_iterate_phdr(find_static_shared, &worker);
  worker.thread = pthread_self();
  worker.block = make_block(worker);
  for (;;) {
    worker.place = __atomic_fetch_add(&launch.next_place, 1, __ATOMIC_SEQ_CST);
    if (worker.place >= launch.blocks || worker.place > __atomic_load_n(&launch.failed_place, __ATOMIC_SEQ_CST)) break;
    if (sigsetjmp(worker.escape, 1) == 0) run_block(worker, launch.order.block(worker.place));
    worker.running = 0;
    release_asynchronous_state(*worker.block);
    if (!worker.failed) continue;
    note_failure(launch, worker.place);
    break;
  }
  release_block(*worker.block);
  sigaltstack(&before, nullptr);
  free(signal_stack);
  pthread_mutex_lock(&launch.lock);
  launch.finished++;
  pthread_cond_signal(&launch.done);
  pthread_mutex_unlock(&launch.lock);
  return nullptr;
}

}  // namespace emulation
