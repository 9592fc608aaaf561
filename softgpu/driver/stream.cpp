#include "stream.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <utility>

#include "device.h"
#include "finding.h"
#include "settings.h"

namespace softgpu {

// Never destroyed: threads of streams wait for them when the process ends.
std::mutex& state_lock = *new std::mutex;
std::condition_variable& state_changed = *new std::condition_variable;
std::uint64_t live_graphs = 0, live_events = 0;

namespace {

thread_local int thread_capture_mode = 0;  // CUstreamCaptureMode: global

// Never destroyed: threads of streams outlive main.
struct State {
  std::map<Stream*, std::shared_ptr<Stream>> streams;
  std::map<int, std::shared_ptr<Stream>> legacy;
  std::map<std::pair<int, std::thread::id>, std::shared_ptr<Stream>> per_thread;
  std::map<int, Status> failed;
  std::uint32_t streams_made = 0;
  // What the program's threads have waited for. All share one clock, because how they order each other is not seen.
  Clock host;
};
State& state() {
  static auto* all = new State;
  return *all;
}

// How long an operation that can start is delayed: most not at all, some a little, few much.
std::chrono::microseconds delay_of(std::uint32_t stream, std::uint64_t number) {
  std::uint64_t z = settings().seed * 0x9E3779B97F4A7C15ull + stream * 0xBF58476D1CE4E5B9ull + number;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  const unsigned choice = z % 64;
  if (choice < 48) return std::chrono::microseconds(0);
  if (choice < 63) return std::chrono::microseconds(z >> 8 & 255);
  return std::chrono::microseconds(z >> 8 & 4095);
}

void serve(std::shared_ptr<Stream> stream);

std::shared_ptr<Stream> make_stream(int device, unsigned flags, int priority, bool legacy) {
  auto stream = std::make_shared<Stream>();
  stream->device = device;
  stream->id = state().streams_made++;
  stream->legacy = legacy;
  stream->blocking = !(flags & 1);  // CU_STREAM_NON_BLOCKING
  stream->flags = flags;
  stream->priority = priority;
  state().streams[stream.get()] = stream;
  std::thread(serve, stream).detach();
  return stream;
}

std::shared_ptr<Stream> legacy_stream(int device) {
  auto& stream = state().legacy[device];
  if (!stream) stream = make_stream(device, 0, 0, true);
  stream->implicit = true;
  return stream;
}

std::shared_ptr<Stream> per_thread_stream(int device) {
  auto& stream = state().per_thread[{device, std::this_thread::get_id()}];
  if (!stream) stream = make_stream(device, 0, 0, false);
  stream->implicit = true;
  return stream;
}

Position position_of(Stream& stream) { return {stream.shared_from_this(), stream.issued, stream.clock}; }

// Programming Guide, "Default Stream": the legacy stream waits for all blocking streams, and they for it.
void order_with_legacy(Stream& stream) {
  if (!stream.blocking) return;
  for (const auto& [key, other] : state().streams)
    if (other->device == stream.device && other.get() != &stream && other->blocking &&
        (stream.legacy || other->legacy) && other->issued)
      stream.pending.push_back(position_of(*other));
}

void push(Stream& stream, Step step) {
  order_with_legacy(stream);
  stream.clock.join(state().host);
  for (const Position& position : stream.pending) stream.clock.join(position.clock);
  Operation operation;
  operation.after.swap(stream.pending);
  operation.place = std::make_shared<Place>();
  operation.place->name = step.name;
  operation.place->stream = stream.id;
  operation.place->number = ++stream.issued;
  operation.place->before = stream.clock;
  operation.step = std::move(step);
  stream.clock.raise(stream.id, stream.issued);
  stream.queue.push_back(std::move(operation));
  state_changed.notify_all();
}

// Programming Guide, "Prohibited and Unhandled Operations": the legacy stream encompasses all blocking streams, so any use
// of it while one of them is being captured is invalid, and breaks that capture.
Status refuse_legacy(const Stream& stream) {
  Status status = success;
  if (!stream.legacy) return status;
  for (const auto& [key, other] : state().streams)
    if (other->device == stream.device && other->blocking && other->capture) {
      other->capture_broken = true;
      status = capture_implicit;
    }
  return status;
}

bool ready(const Operation& operation) {
  return std::all_of(operation.after.begin(), operation.after.end(), [](const Position& p) { return p.reached(); });
}

// The thread of a stream.
void serve(std::shared_ptr<Stream> stream) {
  Held held(state_lock);
  for (;;) {
    state_changed.wait(held, [&] {
      return stream->queue.empty() ? stream->destroyed : ready(stream->queue.front()) || sticky(stream->device);
    });
    if (stream->queue.empty()) break;
    stream->running = std::make_shared<const Operation>(std::move(stream->queue.front()));
    stream->queue.pop_front();
    const Operation& operation = *stream->running;
    std::vector<Access> accesses = operation.step.accesses;
    // Operations after a failure do not run.
    if (sticky(stream->device) == success) {
      held.unlock();
      const auto delay = delay_of(stream->id, operation.place->number);
      if (delay.count()) std::this_thread::sleep_for(delay);
      const Status status = operation.step.work(accesses);
      held.lock();
      if (status != success) fail_device(stream->device, status);
      else note_accesses(operation.place, accesses);
    }
    stream->completed = operation.place->number;
    stream->running.reset();
    state_changed.notify_all();
  }
  state().streams.erase(stream.get());
}

template <class Reached>
Status wait_until(Held& held, int device, const Clock& clock, Reached reached) {
  state_changed.wait(held, [&] { return reached() || sticky(device) != success; });
  if (sticky(device) != success) return sticky(device);
  state().host.join(clock);
  return success;
}

}  // namespace

bool Position::reached() const { return !stream || stream->completed >= number; }

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

Status sticky(int device) {
  const auto found = state().failed.find(device);
  return found == state().failed.end() ? success : found->second;
}

void fail_device(int device, Status status) {
  state().failed.emplace(device, status);  // the first one stays
  state_changed.notify_all();
}

std::shared_ptr<Stream> create_stream(int device, unsigned flags, int priority) {
  return make_stream(device, flags, priority, false);
}

// Driver API, cuStreamDestroy: returns at once; the stream goes when its work is over.
Status destroy_stream(Stream* stream) {
  const auto found = state().streams.find(stream);
  if (found == state().streams.end() || stream->implicit || stream->destroyed) return invalid_handle;
  stream->destroyed = true;
  state_changed.notify_all();
  return success;
}

std::uint64_t stream_count() {
  std::uint64_t count = 0;
  for (const auto& [key, stream] : state().streams) count += !stream->implicit && !stream->destroyed;
  return count;
}

std::shared_ptr<Stream> find_stream(void* handle) {
  const auto number = reinterpret_cast<std::uintptr_t>(handle);
  if (number == 2) return per_thread_stream(current_device());
  if (number < 2) return legacy_stream(current_device());
  const auto found = state().streams.find(static_cast<Stream*>(handle));
  return found == state().streams.end() || found->second->destroyed ? nullptr : found->second;
}

Status enqueue(Stream& stream, Step step) {
  if (const Status status = sticky(stream.device)) return status;
  if (const Status status = refuse_legacy(stream)) return status;
  if (stream.capture) {
    if (stream.capture_broken) return capture_invalidated;
    stream.capture->steps.push_back(std::move(step));
    return success;
  }
  push(stream, std::move(step));
  return success;
}

Status record(Event& event, Stream& stream) {
  if (const Status status = sticky(stream.device)) return status;
  if (event.device != stream.device) return invalid_handle;  // "Stream and Event Behavior"
  if (const Status status = refuse_legacy(stream)) return status;
  event.recorded = true;
  event.captured = stream.capture != nullptr;
  event.lost = !event.captured && strikes(faults.event);
  if (event.captured) return success;
  auto time = event.time = std::make_shared<double>(0.0);
  push(stream, {"the record of an event", {}, {}, [time](std::vector<Access>&) {
                  *time = now();
                  return success;
                }});
  event.position = position_of(stream);
  return success;
}

Status wait_for(Stream& stream, const Event& event) {
  if (const Status status = sticky(stream.device)) return status;
  if (const Status status = refuse_legacy(stream)) return status;
  if (!event.recorded) return success;
  if (stream.capture) {
    // An event from outside of the capture would be a dependency that the graph cannot hold.
    if (event.captured) return success;
    stream.capture_broken = true;
    return capture_isolation;
  }
  if (event.captured) return capture_unsupported;  // would join a capture, which this driver does not do
  stream.pending.push_back(event.position);
  if (event.lost) stream.pending.back().number = ~std::uint64_t{0};
  return success;
}

Status query(const Event& event) {
  if (event.captured) return captured_event;
  if (const Status status = refuse_in_capture()) return status;
  if (!event.recorded) return success;
  if (const Status status = sticky(event.position.stream->device)) return status;
  if (event.lost || !event.position.reached()) return not_ready;
  state().host.join(event.position.clock);
  return success;
}

Status query(Stream& stream) {
  if (const Status status = refuse_legacy(stream)) return status;
  if (stream.capture) {
    stream.capture_broken = true;
    return capture_unsupported;
  }
  if (const Status status = sticky(stream.device)) return status;
  if (stream.completed < stream.issued) return not_ready;
  state().host.join(stream.clock);
  return success;
}

Status synchronize(Held& held, const Event& event) {
  if (event.captured) return captured_event;
  if (!event.recorded) return success;
  const Position position = event.position;  // the event may be recorded again meanwhile
  const bool lost = event.lost;
  return wait_until(held, position.stream->device, position.clock, [&] { return !lost && position.reached(); });
}

Status synchronize(Held& held, Stream& stream) {
  if (const Status status = refuse_legacy(stream)) return status;
  if (stream.capture) {
    stream.capture_broken = true;
    return capture_unsupported;
  }
  const Position position = position_of(stream);
  return wait_until(held, stream.device, position.clock, [&] { return position.reached(); });
}

Status synchronize_device(Held& held, int device) {
  if (const Status status = refuse_in_capture()) return status;
  std::vector<Position> positions;
  Clock clock;
  for (const auto& [key, stream] : state().streams) {
    if (stream->device != device) continue;
    positions.push_back(position_of(*stream));
    clock.join(stream->clock);
  }
  return wait_until(held, device, clock, [&] {
    return std::all_of(positions.begin(), positions.end(), [](const Position& p) { return p.reached(); });
  });
}

Status begin_capture(Stream& stream, int mode) {
  if (const Status status = sticky(stream.device)) return status;
  if (stream.legacy) return capture_unsupported;
  if (stream.capture) return illegal_state;
  stream.capture = std::make_unique<Graph>();
  stream.capture_broken = false;
  stream.capture_mode = mode;
  stream.capture_thread = std::this_thread::get_id();
  return success;
}

Status end_capture(Stream& stream, Graph** graph) {
  *graph = nullptr;
  if (!stream.capture) return illegal_state;
  constexpr int RELAXED = 2;
  if (stream.capture_mode != RELAXED && stream.capture_thread != std::this_thread::get_id()) return capture_wrong_thread;
  auto made = std::move(stream.capture);
  if (stream.capture_broken) return capture_invalidated;
  *graph = made.release();
  return success;
}

int exchange_capture_mode(int mode) { return std::exchange(thread_capture_mode, mode); }

Status refuse_in_capture() {
  constexpr int GLOBAL = 0, RELAXED = 2;
  if (thread_capture_mode == RELAXED) return success;
  Status status = success;
  for (const auto& [key, stream] : state().streams) {
    if (!stream->capture || stream->capture_mode == RELAXED) continue;
    if (stream->capture_mode != GLOBAL && stream->capture_thread != std::this_thread::get_id()) continue;
    stream->capture_broken = true;
    status = capture_unsupported;
  }
  return status;
}

// Driver API, cuStreamIsCapturing: a question about the legacy stream while a blocking one is being captured is an error,
// and breaks no capture.
Status capture_status(const Stream& stream, int* status) {
  for (const auto& [key, other] : state().streams)
    if (stream.legacy && other->device == stream.device && other->blocking && other->capture) return capture_implicit;
  *status = !stream.capture ? 0 : stream.capture_broken ? 2 : 1;  // CUstreamCaptureStatus
  return success;
}

std::vector<std::string> unfinished_on(Range range) {
  std::set<std::string> names;
  const auto look = [&](const Operation& operation) {
    const auto& step = operation.step;
    const bool touches =
        std::any_of(step.accesses.begin(), step.accesses.end(), [&](const Access& a) { return a.bytes.overlaps(range); }) ||
        std::any_of(step.may_touch.begin(), step.may_touch.end(), [&](const Range& r) { return r.overlaps(range); });
    if (touches) names.insert(step.name + " on stream " + std::to_string(operation.place->stream));
  };
  for (const auto& [key, stream] : state().streams) {
    if (sticky(stream->device) != success) continue;
    if (stream->running) look(*stream->running);
    for (const Operation& operation : stream->queue) look(operation);
  }
  for (const auto& place : accesses_after(state().host, range))
    names.insert(place->name + " on stream " + std::to_string(place->stream));
  return {names.begin(), names.end()};
}

}  // namespace softgpu
