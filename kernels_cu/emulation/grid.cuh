// Runs a grid on several workers within a time limit.
#pragma once

#include "emulation/launch.cuh"
#include "emulation/worker.cuh"

namespace emulation {

// A fault of the launch as a whole.
__attribute__((format(printf, 3, 4))) inline int refuse(Request& request, const char* what, const char* format, ...) {
  Fault& fault = *request.fault;
  memset(&fault, 0, sizeof fault);
  fault.thread = fault.buffer = -1;
  snprintf(fault.kind, sizeof fault.kind, "%s", what);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(fault.text, sizeof fault.text, format, arguments);
  va_end(arguments);
  return 1;
}

inline timespec after(double seconds) {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  double whole = floor(seconds);
  t.tv_sec += time_t(whole);
  t.tv_nsec += long((seconds - whole) * 1e9);
  if (t.tv_nsec >= 1000000000L) {
    t.tv_sec++;
    t.tv_nsec -= 1000000000L;
  }
  return t;
}

// Waits for the workers. Past the limit it first asks them to stop when they yield, then sends a signal. Returns
// whether all came to their own end.
inline bool supervise(Launch& launch) {
  pthread_mutex_lock(&launch.lock);
  timespec until = after(launch.request->limit_seconds);
  bool asked = false;
  while (launch.finished < launch.worker_count) {
    if (pthread_cond_timedwait(&launch.done, &launch.lock, &until) == 0) continue;
    for (uint32_t i = 0; i < launch.worker_count; i++) {
      launch.worker[i].expired = 1;
      if (asked && launch.worker[i].running) pthread_kill(launch.worker[i].thread, SIGVTALRM);
    }
    note_failure(launch, 0);
    asked = true;
    until = after(0.2);
  }
  pthread_mutex_unlock(&launch.lock);
  return !asked;
}

inline Launch* start_launch(Request& request, void (*call)(void*, void* const*), void* kernel) {
  Launch* launch = static_cast<Launch*>(calloc(1, sizeof(Launch)));
  if (!launch) abort();
  launch->request = &request;
  launch->call = call;
  launch->kernel = kernel;
  launch->blocks = uint64_t(request.grid[0]) * request.grid[1] * request.grid[2];
  launch->order.choose(launch->blocks, request.seed);
  launch->failed_place = ~0ull;
  launch->worker_count = uint32_t(lower(uint64_t(lower(request.workers, MAX_WORKERS)), launch->blocks));
  pthread_mutex_init(&launch->lock, nullptr);
  pthread_mutex_init(&launch->passed.lock, nullptr);
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&launch->done, &attributes);
  pthread_condattr_destroy(&attributes);
  void* loaded;
  backtrace(&loaded, 1);  // loads the unwinder, which a signal handler must not load
  active_launch = launch;
  signal_actions.install();
  for (uint32_t i = 0; i < launch->worker_count; i++) {
    Worker& worker = launch->worker[i];
    worker.launch = launch;
    worker.arena = &request.arenas[i];
    worker.passed = &launch->passed;
    worker.number = i;
    if (pthread_create(&worker.thread, nullptr, worker_main, &worker)) abort();
  }
  return launch;
}

// Joins the workers; returns the one whose block started first of those that failed, if any failed.
inline const Worker* join_workers(Launch& launch) {
  const Worker* failed = nullptr;
  launch.request->switches = 0;
  for (uint32_t i = 0; i < launch.worker_count; i++) {
    const Worker& worker = launch.worker[i];
    pthread_join(worker.thread, nullptr);
    launch.request->switches += worker.switches;
    if (worker.failed && (!failed || worker.place < failed->place)) failed = &worker;
  }
  signal_actions.restore();
  active_launch = nullptr;
  return failed;
}

int launch(Request& request, uint64_t count, const uint64_t* bytes, void (*call)(void*, void* const*), void* kernel) {
  if (request.argument_count != count)
    return refuse(request, kind::argument, "%u arguments for a kernel that takes %llu", request.argument_count,
                  static_cast<unsigned long long>(count));
  for (uint32_t i = 0; i < count; i++) {
    const unsigned long long given = request.argument_bytes[i], taken = bytes[i];
    if (given != taken)
      return refuse(request, kind::argument, "argument %u has %llu bytes, the kernel takes %llu", i, given, taken);
  }
  Launch* launch = start_launch(request, call, kernel);
  const bool in_time = supervise(*launch);
  const Worker* failed = join_workers(*launch);
  if (failed) *request.fault = failed->fault;
  else if (!in_time)
    refuse(request, kind::time_limit, "the launch ran longer than its %g s, blocks are missing", request.limit_seconds);
  pthread_cond_destroy(&launch->done);
  pthread_mutex_destroy(&launch->lock);
  pthread_mutex_destroy(&launch->passed.lock);
  for (List<PassedWord>& words : launch->passed.words) words.release();
  free(launch);
  return failed || !in_time;
}

}  // namespace emulation
