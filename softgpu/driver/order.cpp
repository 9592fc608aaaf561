#include "order.h"

#include <algorithm>
#include <deque>

#include "finding.h"

namespace softgpu {
namespace {

struct Noted {
  std::shared_ptr<const Place> place;
  Access access;
};

constexpr std::size_t REMEMBERED = 2048;  // accesses; a race is between operations that are near each other

std::deque<Noted>& history() {
  static auto* all = new std::deque<Noted>;
  return *all;
}

const char* verb(const Access& access) { return access.writes ? "writes" : "reads"; }

}  // namespace

void note_accesses(const std::shared_ptr<const Place>& place, const std::vector<Access>& accesses) {
  for (const Access& access : accesses) {
    for (const Noted& other : history()) {
      if (!access.writes && !other.access.writes) continue;
      if (!access.bytes.overlaps(other.access.bytes)) continue;
      if (place->after(*other.place) || other.place->after(*place)) continue;
      const Address first = std::max(access.bytes.begin, other.access.bytes.begin);
      report(format("race: %s on stream %u %s memory at 0x%llx that %s on stream %u %s, and nothing orders them",
                    place->name.c_str(), place->stream, verb(access), static_cast<unsigned long long>(first),
                    other.place->name.c_str(), other.place->stream, verb(other.access)));
    }
  }
  for (const Access& access : accesses) history().push_back({place, access});
  while (history().size() > REMEMBERED) history().pop_front();
}

void forget_accesses(Range range) {
  auto& all = history();
  all.erase(std::remove_if(all.begin(), all.end(), [&](const Noted& n) { return n.access.bytes.overlaps(range); }),
            all.end());
}

std::vector<std::shared_ptr<const Place>> accesses_after(const Clock& clock, Range range) {
  std::vector<std::shared_ptr<const Place>> found;
  for (const Noted& noted : history())
    if (noted.access.bytes.overlaps(range) && !clock.covers(noted.place->stream, noted.place->number))
      found.push_back(noted.place);
  return found;
}

}  // namespace softgpu
