#include "launch.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "finding.h"
#include "settings.h"
#include "worker.h"

namespace softgpu {
namespace {

std::atomic<std::uint64_t> launches{0};

// The part of device memory that an allocator has given out and that holds the address, or its whole block.
bool region_of(Address address, Range* region) {
  int device;
  if (!find_block(address, region, &device)) return false;
  for (const Range& lease : leases_in({address, address + 1})) *region = lease;
  return true;
}

// The regions to which a word of the arguments may point: pointers, and addresses in tensor maps.
std::vector<Range> pointed_to(const Launch& launch) {
  std::vector<Range> found;
  std::size_t offset = 0;
  for (const std::uint64_t bytes : launch.argument_sizes) {
    for (std::size_t i = 0; i + 8 <= bytes; i += 8) {
      Address word;
      std::memcpy(&word, launch.arguments.data() + offset + i, 8);
      Range region;
      if (region_of(word, &region)) found.push_back(region);
    }
    offset += bytes;
  }
  return found;
}

// What a kernel has accessed, as exactly as its pages tell. If several leases share a page, only those that its
// arguments point to.
void add_accesses(const TouchedRange& touched, const std::vector<Range>& pointed, std::vector<Access>& accesses) {
  const Range range{touched.begin, touched.end};
  const auto add = [&](const Range& part) {
    accesses.push_back({{std::max(part.begin, range.begin), std::min(part.end, range.end)}, touched.written != 0});
  };
  const std::vector<Range> shared = leases_in(range);
  if (shared.empty()) return add(range);
  for (const Range& part : shared) {
    bool meant = shared.size() == 1;
    for (const Range& other : pointed) meant |= other.overlaps(part);
    if (meant) add(part);
  }
}

// The statuses that CUDA documents for what a kernel does wrong.
Status status_of(const std::string& kind) {
  if (kind == "out_of_bounds") return illegal_address;
  if (kind == "misaligned") return misaligned_address;
  if (kind == "time_limit") return launch_timeout;
  return launch_failed;
}

std::string quoted(const std::string& text) {
  std::string all = "'";
  for (const char c : text) all += c == '\'' ? "'\\''" : std::string(1, c);
  return all + "'";
}

// Where the thread was, by lines.py: " at FILE:LINE ...". Waits for a process, so nothing is locked.
std::string place_of(const Launch& launch, const LaunchReply& reply) {
  const char* lines = std::getenv("SOFTGPU_LINES");
  if (!lines || (!reply.frame_count && !reply.issued)) return {};
  std::string command = lines;
  command += " " + quoted(launch.library) + " " + quoted(launch.source) + " " + std::to_string(reply.issued);
  for (std::uint32_t i = 0; i < reply.frame_count; i++) command += " " + std::to_string(reply.frames[i]);
  std::string printed;
  if (FILE* pipe = popen(command.c_str(), "re")) {
    char part[256];
    while (const std::size_t bytes = std::fread(part, 1, sizeof part, pipe)) printed.append(part, bytes);
    pclose(pipe);
  }
  return printed;
}

std::string describe(const Launch& launch, const LaunchReply& reply, const std::string& place) {
  std::string where = format("block (%u, %u, %u)", reply.block[0], reply.block[1], reply.block[2]);
  if (reply.thread >= 0)
    where += format(" thread %d (warp %d lane %d)", reply.thread, reply.thread / 32, reply.thread % 32);
  where += place;
  std::string text = format("%s in %s, %s: %s", reply.kind, launch.entry.c_str(), where.c_str(), reply.text);
  if (!reply.address) return text;
  text += format(" at address 0x%llx", static_cast<unsigned long long>(reply.address));
  Range region;
  if (region_of(reply.address, &region))
    text += format(", byte %lld of %llu", static_cast<long long>(reply.address - region.begin),
                   static_cast<unsigned long long>(region.end - region.begin));
  else text += was_freed(reply.address) ? ", which was freed" : ", where nothing is allocated";
  return text;
}

}  // namespace

Step launch_step(const Function& function, const std::uint32_t grid[3], const std::uint32_t block[3],
                 std::uint32_t shared_bytes, void* const* arguments) {
  Launch launch;
  launch.library = function.kernel.library;
  launch.entry = function.kernel.name;
  launch.source = function.kernel.source;
  std::memcpy(launch.grid, grid, sizeof launch.grid);
  std::memcpy(launch.block, block, sizeof launch.block);
  launch.shared_bytes = shared_bytes;
  launch.argument_sizes = function.kernel.argument_sizes;
  for (std::size_t i = 0; i < launch.argument_sizes.size(); i++) {
    const char* first = static_cast<const char*>(arguments[i]);
    launch.arguments.insert(launch.arguments.end(), first, first + launch.argument_sizes[i]);
  }
  std::vector<Range> pointed = pointed_to(launch);
  const int device = function.module->device;
  const auto work = [launch, pointed, device](std::vector<Access>& accesses) {
    std::vector<Range> blocks;
    Range span;
    int file;
    {
      Held held(state_lock);
      blocks = blocks_of(device);
      span = span_of(device);
      file = file_of(device);
    }
    const std::uint64_t number = launches++;
    const std::uint64_t seed = settings().seed ? settings().seed * 1000003 + number : 0;
    if (strikes(faults.launch)) return static_cast<Status>(faults.launch_status.load());
    const Outcome outcome = run(device, file, span, launch, blocks, seed);
    const std::string place = outcome.reply.failed ? place_of(launch, outcome.reply) : "";
    Held held(state_lock);
    if (outcome.reply.failed) {
      report(describe(launch, outcome.reply, place));
      return status_of(outcome.reply.kind);
    }
    for (const TouchedRange& touched : outcome.touched) add_accesses(touched, pointed, accesses);
    return success;
  };
  return {"kernel " + function.kernel.name, {}, std::move(pointed), work};
}

}  // namespace softgpu
