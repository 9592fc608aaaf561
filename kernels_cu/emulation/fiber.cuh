// Fibers: each CUDA thread has its own stack and yields only inside the emulation's functions.
// x86-64 switches with a dozen instructions (a call-preserved register set and the stack pointer); other processors, or
// -DGPU_ACTORS_UCONTEXT, use ucontext.
#pragma once

#include "emulation/calls.cuh"
#include "emulation/system.cuh"

#if !defined(__x86_64__) && !defined(GPU_ACTORS_UCONTEXT)
#define GPU_ACTORS_UCONTEXT
#endif
#ifdef GPU_ACTORS_UCONTEXT
#include <ucontext.h>
#endif

namespace emulation {

struct Launch;
struct PassedWords;  // passed_words.cuh

// The thread that a fault is blamed on, if the running thread acts for another one. thread -1: the running one.
struct Blamed {
  int thread;
  const void* issued;  // Fiber::statement, null: the running thread's own calls tell
};

struct Worker {
  Launch* launch;
  const Arena* arena;
  PassedWords* passed;
  Block* block;
  void* stack_pointer;  // of the worker itself while a fiber runs
  sigjmp_buf escape;    // out of the signal handler
  pthread_t thread;
  uint32_t number;
  volatile sig_atomic_t running;  // inside a block, so that a signal may end it
  volatile sig_atomic_t expired;  // the time limit has passed
  volatile sig_atomic_t unwinding;  // reads a stack that the kernel may have overwritten
  sigjmp_buf unwound;               // out of that
  Blamed blamed;
  bool failed;
  uint64_t place;  // of its block, in the order in which blocks start
  uint64_t switches;
  char* static_begin;  // this thread's copy of the static __shared__ variables
  char* static_end;
  Fault fault;
};

// Holds a lock that workers share. A signal that would end the block meanwhile has no effect, and is sent again.
struct Locked {
  Worker& worker;
  pthread_mutex_t& lock;

  Locked(Block& block, pthread_mutex_t& lock_) : worker(*block.worker), lock(lock_) {
    worker.running = 0;
    pthread_mutex_lock(&lock);
  }
  ~Locked() {
    pthread_mutex_unlock(&lock);
    worker.running = 1;
  }
};

#ifdef GPU_ACTORS_UCONTEXT
struct Context {
  ucontext_t registers;
};
static_assert(sizeof(Context) <= 4096, "a context fits behind the guard page");

inline void switch_context(void** save, void* to) {
  ucontext_t here;
  *save = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to));
}
inline void prepare_context(Fiber& fiber, void (*main)()) {
  ucontext_t* context = reinterpret_cast<ucontext_t*>(fiber.stack + STACK_GUARD);
  getcontext(context);
  context->uc_stack.ss_sp = fiber.stack + STACK_GUARD + sizeof(Context);
  context->uc_stack.ss_size = STACK_BYTES - STACK_GUARD - FIBER_PLACES * FIBER_STEP - sizeof(Context);
  context->uc_link = nullptr;
  makecontext(context, main, 0);
  fiber.stack_pointer = context;
}
#else
extern "C" __attribute__((visibility("hidden"))) void gpu_actors_switch_context(void** save, void* to);

inline void switch_context(void** save, void* to) { gpu_actors_switch_context(save, to); }
inline void prepare_context(Fiber& fiber, void (*main)()) {
  void** top = reinterpret_cast<void**>(&fiber);
  *--top = nullptr;  // where main would return to; keeps rsp % 16 == 8 at its entry
  *--top = reinterpret_cast<void*>(main);
  for (int i = 0; i < 6; i++) *--top = nullptr;  // rbp, rbx, r12 .. r15
  fiber.stack_pointer = top;
}
#endif

// Ends the block from inside a fiber: the worker continues after the switch that started it.
[[noreturn]] inline void leave_block(Block& block) {
  void* unused;
  block.current = nullptr;
  switch_context(&unused, block.worker->stack_pointer);
  abort();
}

// The object file that this is linked into: symbols of the linker.
extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start[];
extern "C" __attribute__((visibility("hidden"))) const char _end[];

inline uint64_t offset_in_module(const void* code) {
  const char* at = static_cast<const char*>(code);
  return at >= __ehdr_start && at < _end ? uint64_t(at - __ehdr_start) : 0;
}

// Notes the calls on the stack in use. interrupted: the instruction that a signal interrupted, whose frames come after
// those of the handler; else null. If a kernel has overwritten its stack, none of its frames is noted.
inline void note_calls(Worker& worker, const void* interrupted) {
  Fault& fault = worker.fault;
  void* found[MAX_FRAMES + 16];
  volatile int count = 0;
  worker.unwinding = 1;
  if (sigsetjmp(worker.unwound, 1) == 0) count = backtrace(found, MAX_FRAMES + 16);
  worker.unwinding = 0;
  int first = 0;
  if (interrupted) {
    fault.frames[fault.frame_count++] = offset_in_module(static_cast<const char*>(interrupted) + 1);
    while (first < count && found[first++] != interrupted) {}
  }
  for (int i = first; i < count && fault.frame_count < MAX_FRAMES; i++)
    if (const uint64_t offset = offset_in_module(found[i])) fault.frames[fault.frame_count++] = offset;
}

// The following work is done for another thread, whose statement `issued` began it, or, with thread -1, for an earlier
// statement of the running thread.
inline void blame(Block& block, int thread, const void* issued) { block.worker->blamed = {thread, issued}; }
inline void blame_running(Block& block) { block.worker->blamed = {-1, nullptr}; }

inline void describe_fault(Worker& worker, const char* what, const Fiber* fiber, const char* format,
                           va_list arguments, const void* interrupted = nullptr) {
  Fault& fault = worker.fault;
  snprintf(fault.kind, sizeof fault.kind, "%s", what);
  fault.block[0] = worker.block->index.x;
  fault.block[1] = worker.block->index.y;
  fault.block[2] = worker.block->index.z;
  const Blamed& blamed = worker.blamed;
  fault.thread = blamed.thread >= 0 ? blamed.thread : fiber ? fiber->linear : -1;
  fault.buffer = -1;
  fault.address = 0;
  fault.frame_count = 0;
  fault.issued = blamed.issued ? offset_in_module(blamed.issued) : 0;
  vsnprintf(fault.text, sizeof fault.text, format, arguments);
  if (fiber && fault.thread == fiber->linear) note_calls(worker, interrupted);
  worker.failed = true;
}

// Reports a fault of the running thread and ends the launch.
[[noreturn]] void fail(const char* what, const char* format, ...) {
  Fiber& fiber = self();
  va_list arguments;
  va_start(arguments, format);
  describe_fault(*fiber.block->worker, what, &fiber, format, arguments);
  va_end(arguments);
  leave_block(*fiber.block);
}

// The same, with the address in global memory that is at fault. The caller of the launch names its buffer.
[[noreturn]] inline void fail_at(const char* what, const void* address, const char* operation, size_t bytes) {
  Fiber& fiber = self();
  Worker& worker = *fiber.block->worker;
  va_list none{};
  describe_fault(worker, what, &fiber, "", none);
  snprintf(worker.fault.text, sizeof worker.fault.text, "%s: %zu bytes", operation, bytes);
  worker.fault.address = reinterpret_cast<uintptr_t>(address);
  leave_block(*fiber.block);
}

// A fault found when no thread runs any more.
__attribute__((format(printf, 3, 4))) inline void report(Block& block, const char* what, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  describe_fault(*block.worker, what, nullptr, format, arguments);
  va_end(arguments);
}

}  // namespace emulation
