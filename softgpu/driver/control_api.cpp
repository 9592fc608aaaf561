// For tests: findings, leases, faults on demand. softgpu/control.py calls these.
#include <algorithm>
#include <cstring>
#include <string>

#include "finding.h"
#include "memory.h"
#include "module.h"
#include "settings.h"
#include "stream.h"

using namespace softgpu;

#define CONTROL extern "C" __attribute__((visibility("default")))

CONTROL void softgpu_set_finder(Finder finder) { set_finder(finder); }

// Writes the oldest finding that has not been taken. Returns false if there is none.
CONTROL bool softgpu_take_finding(char* text, std::size_t room) {
  const std::string finding = take_finding();
  if (finding.empty()) return false;
  const std::size_t length = std::min(finding.size(), room - 1);
  std::memcpy(text, finding.data(), length);
  text[length] = 0;
  return true;
}

namespace {

void report_users(Range range, const char* what) {
  for (const std::string& operation : unfinished_on(range))
    report(format("freed too early: memory at 0x%llx %s, and the program has not waited for %s",
                  static_cast<unsigned long long>(range.begin), what, operation.c_str()));
}

}  // namespace

// An allocator above the driver gives these bytes out. Those up to the next multiple of `unit` belong to no allocation.
CONTROL void softgpu_lease(Address address, std::size_t bytes, std::size_t unit) {
  Held held(state_lock);
  report_users({address, address + bytes}, "is given out");
  lease({address, address + bytes}, (unit - bytes % unit) % unit);
}

// The allocator takes the bytes back. No operation that the program has not waited for may still use them.
CONTROL void softgpu_release(Address address) {
  Held held(state_lock);
  Range part;
  bool intact;
  for (const Range& known : leases_in({address, address + 1})) report_users(known, "is given back");
  if (!release_lease(address, &part, &intact)) return;
  if (!intact)
    report(format("out_of_bounds: something wrote behind the %llu bytes at 0x%llx",
                  static_cast<unsigned long long>(part.end - part.begin), static_cast<unsigned long long>(part.begin)));
  forget_accesses(part);
}

// Objects that the program has made and not destroyed. what: "streams", "events", "graphs" or "modules", or the bytes
// of "memory" and "pinned" memory.
CONTROL std::uint64_t softgpu_count(const char* what) {
  Held held(state_lock);
  const std::string name = what;
  if (name == "streams") return stream_count();
  if (name == "events") return live_events;
  if (name == "graphs") return live_graphs;
  if (name == "modules") return module_count();
  if (name == "pinned") return pinned_bytes();
  std::uint64_t bytes = 0;
  for (int device = 0; device < settings().devices; device++) bytes += used_bytes(device);
  return bytes;
}

CONTROL void softgpu_fail_allocation(long number) { faults.allocation = number; }
CONTROL void softgpu_fail_pinned(long number) { faults.pinned = number; }
CONTROL void softgpu_fail_launch(long number, int status) {
  faults.launch_status = status;
  faults.launch = number;
}
CONTROL void softgpu_lose_event(long number) { faults.event = number; }
CONTROL void softgpu_slow_copy(long number, double seconds) {
  faults.copy_seconds = seconds;
  faults.copy = number;
}
