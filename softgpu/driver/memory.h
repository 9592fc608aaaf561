// Memory: of the devices, and page-locked memory of the host.
//
// A device's memory is a file in memory that workers map at the addresses that the program sees. In this process those
// addresses are inaccessible, as device memory is to a host; the driver's own copies go through a second mapping. A
// block ends where inaccessible pages begin, as near as its alignment allows. New bytes are poison, but zero in blocks
// over 64 MiB. An address is not given out again before the whole range has been used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "status.h"

namespace softgpu {

using Address = std::uint64_t;

constexpr unsigned char POISON = 0xFF;  // a NaN in every floating-point format, and -1
constexpr unsigned char LARGE = 0x7F;   // a NaN in fp16, e4m3 and e5m2, a very large number elsewhere
constexpr unsigned char CANARY = 0xC5;  // behind a lease, where nothing may be written

struct Range {
  Address begin = 0, end = 0;

  bool contains(Address address) const { return begin <= address && address < end; }
  bool overlaps(const Range& other) const { return begin < other.end && other.begin < end; }
};

// All of these expect the caller to hold `state_lock` (stream.h).
Status allocate(int device, std::size_t bytes, Address* address);
Status release(Address address, int* device);
std::size_t used_bytes(int device);
int file_of(int device);                   // the memory's file, for workers
Range span_of(int device);                 // all of its addresses
std::vector<Range> blocks_of(int device);  // those that are allocated now, in order
bool find_block(Address address, Range* block, int* device);
bool was_freed(Address address);
void* host_view(Address address);  // where this process reads and writes that byte

// Leases: the parts of blocks that an allocator above the driver has given out. `release_lease` poisons the bytes and
// says whether those behind them still hold the canary.
void lease(Range part, std::size_t slack);
bool release_lease(Address begin, Range* part, bool* intact);
std::vector<Range> leases_in(Range range);

Status allocate_pinned(std::size_t bytes, void** address);
Status release_pinned(void* address);
std::size_t pinned_bytes();
bool is_pinned(const void* address, std::size_t bytes);

}  // namespace softgpu
