// The order that a program asked for: which operation happens before which, and accesses that no order separates.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "memory.h"

namespace softgpu {

// A vector clock: for each stream, the number of its last operation that is known to come first.
class Clock {
 public:
  void join(const Clock& other) {
    for (const auto& [stream, number] : other.last_) raise(stream, number);
  }
  void raise(std::uint32_t stream, std::uint64_t number) {
    std::uint64_t& mine = last_[stream];
    if (mine < number) mine = number;
  }
  bool covers(std::uint32_t stream, std::uint64_t number) const {
    const auto found = last_.find(stream);
    return found != last_.end() && found->second >= number;
  }

 private:
  std::map<std::uint32_t, std::uint64_t> last_;
};

struct Access {
  Range bytes;
  bool writes = false;
};

// The place of an operation in the order.
struct Place {
  std::string name;
  std::uint32_t stream = 0;
  std::uint64_t number = 0;
  Clock before;  // what comes first

  bool after(const Place& other) const {
    return other.stream == stream ? other.number <= number : before.covers(other.stream, other.number);
  }
};

// Notes what an operation has accessed, and reports accesses of others that no order separates from it.
// Expects the caller to hold `state_lock`.
void note_accesses(const std::shared_ptr<const Place>& place, const std::vector<Access>& accesses);

// Forgets the accesses to memory that has been given back.
void forget_accesses(Range range);

// The operations that have accessed the range and that the clock does not cover.
std::vector<std::shared_ptr<const Place>> accesses_after(const Clock& clock, Range range);

}  // namespace softgpu
