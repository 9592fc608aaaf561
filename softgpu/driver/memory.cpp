#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "settings.h"

namespace softgpu {
namespace {

constexpr std::size_t PAGE = 4096, GUARD = 1 << 20, ALIGNMENT = 256;
constexpr Address FIRST = Address{1} << 44;            // far from addresses that the system chooses
constexpr std::size_t SPAN = std::size_t{1} << 40;     // addresses of one device
constexpr std::size_t POISONED = std::size_t{64} << 20;  // larger blocks are left zero, to save memory

std::size_t round_up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

struct Block {
  Range bytes, pages;
};

struct Lease {
  Range bytes;
  std::size_t slack;  // canary bytes behind it
};

struct DeviceMemory {
  int file = -1;
  char* view = nullptr;
  Address first = 0, next = 0;
  std::size_t used = 0;
  std::map<Address, Block> blocks;  // by their first byte
  std::map<Address, Range> freed;

  void open(int device) {
    if (view) return;
    first = next = FIRST + static_cast<Address>(device) * SPAN;
    file = memfd_create("softgpu", MFD_CLOEXEC);
    void* reserved = mmap(reinterpret_cast<void*>(first), SPAN, PROT_NONE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    void* all = MAP_FAILED;
    if (file >= 0 && ftruncate(file, SPAN) == 0)
      all = mmap(nullptr, SPAN, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (reserved == MAP_FAILED || all == MAP_FAILED) {
      std::perror("softgpu: no room for the memory of a device");
      std::abort();
    }
    // A child process would share the file, and its writes would change this process's memory.
    madvise(all, SPAN, MADV_DONTFORK);
    view = static_cast<char*>(all);
  }
};

DeviceMemory* memories() {
  static auto* all = new DeviceMemory[static_cast<std::size_t>(settings().devices)];
  return all;
}

DeviceMemory& memory_of(int device) {
  DeviceMemory& memory = memories()[device];
  memory.open(device);
  return memory;
}

int device_at(Address address) {
  if (address < FIRST) return -1;
  const Address index = (address - FIRST) / SPAN;
  return index < static_cast<Address>(settings().devices) ? static_cast<int>(index) : -1;
}

std::map<Address, Lease>& leases() {
  static auto* all = new std::map<Address, Lease>;
  return *all;
}

std::map<Address, std::size_t>& pinned() {
  static auto* all = new std::map<Address, std::size_t>;
  return *all;
}

}  // namespace

Status allocate(int device, std::size_t bytes, Address* address) {
  if (!bytes) return invalid_value;
  DeviceMemory& memory = memory_of(device);
  const std::size_t room = round_up(bytes, PAGE);
  if (room < bytes || memory.used + room > settings().memory) return out_of_memory;
  if (memory.next + room + 2 * GUARD > memory.first + SPAN) memory.next = memory.first;
  for (;;) {  // skips the blocks in the way once addresses start again at the first
    const Range wanted{memory.next, memory.next + room + 2 * GUARD};
    const auto other = std::find_if(memory.blocks.begin(), memory.blocks.end(),
                                    [&](const auto& entry) { return entry.second.pages.overlaps(wanted); });
    if (other == memory.blocks.end()) break;
    memory.next = other->second.pages.end;
  }
  const Range pages{memory.next + GUARD, memory.next + GUARD + room};
  memory.next = pages.end;
  const Address begin = pages.end - round_up(bytes, ALIGNMENT);
  memory.blocks[begin] = {{begin, begin + bytes}, pages};
  memory.used += room;
  for (auto old = memory.freed.begin(); old != memory.freed.end();)
    old = old->second.overlaps(pages) ? memory.freed.erase(old) : std::next(old);
  if (bytes <= POISONED) std::memset(host_view(pages.begin), POISON, room);
  *address = begin;
  return success;
}

Status release(Address address, int* device) {
  const int found = device_at(address);
  if (found < 0) return invalid_value;
  DeviceMemory& memory = memory_of(found);
  const auto block = memory.blocks.find(address);
  if (block == memory.blocks.end()) return invalid_value;
  const Range pages = block->second.pages;
  fallocate(memory.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(pages.begin - memory.first),
            static_cast<off_t>(pages.end - pages.begin));
  memory.used -= pages.end - pages.begin;
  memory.freed[address] = block->second.bytes;
  memory.blocks.erase(block);
  *device = found;
  return success;
}

std::size_t used_bytes(int device) { return memory_of(device).used; }
int file_of(int device) { return memory_of(device).file; }
Range span_of(int device) { return {memory_of(device).first, memory_of(device).first + SPAN}; }

std::vector<Range> blocks_of(int device) {
  std::vector<Range> all;
  for (const auto& [begin, block] : memory_of(device).blocks) all.push_back(block.bytes);
  return all;
}

bool find_block(Address address, Range* block, int* device) {
  const int found = device_at(address);
  if (found < 0) return false;
  auto& blocks = memory_of(found).blocks;
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return false;
  const Block& before = std::prev(after)->second;
  if (!before.bytes.contains(address)) return false;
  *block = before.bytes;
  *device = found;
  return true;
}

bool was_freed(Address address) {
  const int device = device_at(address);
  if (device < 0) return false;
  auto& freed = memory_of(device).freed;
  auto after = freed.upper_bound(address);
  return after != freed.begin() && std::prev(after)->second.contains(address);
}

void* host_view(Address address) {
  const int device = device_at(address);
  if (device < 0) return reinterpret_cast<void*>(address);
  DeviceMemory& memory = memory_of(device);
  return memory.view + (address - memory.first);
}

void lease(Range part, std::size_t slack) {
  // An uncleared counter may work by luck from -1, an uncleared float from a large number: leases get both in turn.
  static bool odd = false;
  std::memset(host_view(part.begin), (odd = !odd) ? LARGE : POISON, part.end - part.begin);
  std::memset(host_view(part.end), CANARY, slack);
  leases()[part.begin] = {part, slack};
}

bool release_lease(Address begin, Range* part, bool* intact) {
  const auto found = leases().find(begin);
  if (found == leases().end()) return false;
  const Lease given = found->second;
  leases().erase(found);
  *part = given.bytes;
  *intact = true;
  Range block;
  int device;
  if (!find_block(begin, &block, &device)) return true;
  const auto* behind = static_cast<const unsigned char*>(host_view(given.bytes.end));
  *intact = std::all_of(behind, behind + given.slack, [](unsigned char byte) { return byte == CANARY; });
  std::memset(host_view(begin), POISON, given.bytes.end - begin);
  return true;
}

std::vector<Range> leases_in(Range range) {
  std::vector<Range> found;
  auto at = leases().upper_bound(range.begin);
  if (at != leases().begin()) --at;
  for (; at != leases().end() && at->first < range.end; ++at)
    if (at->second.bytes.overlaps(range)) found.push_back(at->second.bytes);
  return found;
}

Status allocate_pinned(std::size_t bytes, void** address) {
  if (!bytes) return invalid_value;
  const std::size_t room = round_up(bytes, PAGE) + 2 * PAGE;
  void* map = mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return out_of_memory;
  char* first = static_cast<char*>(map) + PAGE;
  if (mprotect(first, room - 2 * PAGE, PROT_READ | PROT_WRITE)) return out_of_memory;
  std::memset(first, POISON, room - 2 * PAGE);
  pinned()[reinterpret_cast<Address>(first)] = room - 2 * PAGE;
  *address = first;
  return success;
}

Status release_pinned(void* address) {
  const auto found = pinned().find(reinterpret_cast<Address>(address));
  if (found == pinned().end()) return invalid_value;
  munmap(static_cast<char*>(address) - PAGE, found->second + 2 * PAGE);
  pinned().erase(found);
  return success;
}

std::size_t pinned_bytes() {
  std::size_t bytes = 0;
  for (const auto& [address, size] : pinned()) bytes += size;
  return bytes;
}

bool is_pinned(const void* address, std::size_t bytes) {
  const auto begin = reinterpret_cast<Address>(address);
  auto after = pinned().upper_bound(begin);
  if (after == pinned().begin()) return false;
  --after;
  return begin + bytes <= after->first + after->second;
}

}  // namespace softgpu
