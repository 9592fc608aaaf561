// Streams, events and captures.
//
// CUDA Programming Guide, "Asynchronous Concurrent Execution": operations of a stream run in their order; between
// streams only events, the legacy default stream and the host's waits order anything. Each stream has a thread, which
// starts an operation once all that must come first is over, and after a delay drawn from the seed, the stream and the
// operation's number. So operations that the program leaves unordered run in many orders.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "order.h"

namespace softgpu {

// Guards all of the driver's state. Not held while an operation runs.
extern std::mutex& state_lock;
extern std::condition_variable& state_changed;
using Held = std::unique_lock<std::mutex>;

struct Stream;

// What an operation does. Runs without the lock. Adds the accesses that are known only after it has run.
using Work = std::function<Status(std::vector<Access>& accesses)>;

// An operation before it has a place on a stream: what a capture keeps.
struct Step {
  std::string name;
  std::vector<Access> accesses;  // known beforehand
  std::vector<Range> may_touch;  // what a kernel's arguments point to
  Work work;
};

extern std::uint64_t live_graphs, live_events;  // under the lock

struct Graph {
  std::vector<Step> steps;

  Graph() { live_graphs++; }
  Graph(const Graph& other) : steps(other.steps) { live_graphs++; }
  ~Graph() { live_graphs--; }
};

// A point on a stream, with all that comes before it.
struct Position {
  std::shared_ptr<Stream> stream;
  std::uint64_t number = 0;
  Clock clock;

  bool reached() const;
};

struct Operation {
  Step step;
  std::shared_ptr<Place> place;
  std::vector<Position> after;
};

struct Event {
  Position position;
  int device = 0;
  bool recorded = false;
  bool lost = false;      // its record never completes
  bool captured = false;  // last recorded while its stream was being captured
  bool timed = false;
  std::shared_ptr<double> time = std::make_shared<double>(0.0);  // seconds, once reached

  Event() { live_events++; }
  ~Event() { live_events--; }
  Event(const Event&) = delete;
};

struct Stream : std::enable_shared_from_this<Stream> {
  int device = 0;
  std::uint32_t id = 0;
  bool blocking = false;  // ordered with the legacy default stream
  bool legacy = false;
  bool implicit = false;  // no program has made it: a default stream
  bool destroyed = false;
  unsigned flags = 0;
  int priority = 0;
  std::uint64_t issued = 0, completed = 0;
  Clock clock;
  std::vector<Position> pending;  // to wait for before the next operation
  std::deque<Operation> queue;
  std::shared_ptr<const Operation> running;
  // A capture in progress
  std::unique_ptr<Graph> capture;
  bool capture_broken = false;
  int capture_mode = 0;
  std::thread::id capture_thread;
};

// The functions below expect the caller to hold the lock. Those that wait release it meanwhile.

std::shared_ptr<Stream> create_stream(int device, unsigned flags, int priority);
Status destroy_stream(Stream* stream);
std::uint64_t stream_count();  // those that the program has made and not destroyed
// The stream behind a handle: null and 1 are the legacy default stream of the current device, 2 the calling thread's own
// ("Stream synchronization behavior": local to the thread, and a blocking stream). Null where there is no such stream.
std::shared_ptr<Stream> find_stream(void* handle);

// Queues a step, or adds it to the graph if the stream is being captured.
Status enqueue(Stream& stream, Step step);
Status record(Event& event, Stream& stream);
Status wait_for(Stream& stream, const Event& event);
// success, not_ready, or what the device has failed with.
Status query(const Event& event);
Status query(Stream& stream);
Status synchronize(Held& held, const Event& event);
Status synchronize(Held& held, Stream& stream);
Status synchronize_device(Held& held, int device);

Status begin_capture(Stream& stream, int mode);
Status end_capture(Stream& stream, Graph** graph);
Status capture_status(const Stream& stream, int* status);
// Programming Guide, "Prohibited and Unhandled Operations": a call that may wait for the device breaks the captures of
// this thread that are not relaxed, and those of others whose mode is global.
Status refuse_in_capture();
// Sets the calling thread's mode and returns the former one. A relaxed thread breaks no capture by such a call.
int exchange_capture_mode(int mode);

// The status that a device keeps once a kernel has failed; success until then.
Status sticky(int device);
void fail_device(int device, Status status);

// The names of the operations that may touch the range and are queued or running, and of those that have touched it and
// that the host has not waited for.
std::vector<std::string> unfinished_on(Range range);

double now();  // seconds

}  // namespace softgpu
