// mbarriers. The state lives outside shared memory; the object's 8 bytes hold a tag, so that an overwritten or
// uninitialised mbarrier is noticed.
#pragma once

#include "emulation/collective.cuh"

namespace emulation {

constexpr uint32_t MBARRIER_TAG = 0xBA221E12u;
constexpr int64_t MAX_PENDING_BYTES = (1 << 20) - 1;
constexpr int MAX_ARRIVALS = (1 << 20) - 1;

inline MBarrier* live_mbarrier(uint32_t address, const char* operation) {
  Block& block = *self().block;
  uint32_t tag[2];
  memcpy(tag, shared_pointer(address, 8, operation, 8), 8);
  if (tag[0] != (MBARRIER_TAG ^ address) || tag[1] >= block.mbarrier_count || block.mbarrier[tag[1]].address != address)
    return nullptr;
  return &block.mbarrier[tag[1]];
}

inline MBarrier& find_mbarrier(uint32_t address, const char* operation) {
  MBarrier* m = live_mbarrier(address, operation);
  if (!m)
    fail(kind::mbarrier, "%s: shared address 0x%x holds no live mbarrier (not initialised, or overwritten)", operation,
         address);
  return *m;
}

inline void init_mbarrier(uint32_t address, int count) {
  Block& block = *self().block;
  if (live_mbarrier(address, "mbarrier.init"))
    fail(kind::mbarrier, "mbarrier.init: shared address 0x%x holds an mbarrier already (mbarrier.inval comes first)",
         address);
  if (count < 1 || count > MAX_ARRIVALS)
    fail(kind::mbarrier, "mbarrier.init: %d arrivals, a phase takes 1 to %d", count, MAX_ARRIVALS);
  if (block.mbarrier_count == MAX_MBARRIERS)
    fail(kind::mbarrier, "mbarrier.init: more than %u mbarriers", MAX_MBARRIERS);
  uint32_t tag[2] = {MBARRIER_TAG ^ address, block.mbarrier_count};
  memcpy(shared_pointer(address, 8, "mbarrier.init", 8), tag, 8);
  block.mbarrier[block.mbarrier_count++] = MBarrier{0, address, count, count, 0};
  block.mbarrier_init_unfenced = true;
}

inline void invalidate_mbarrier(uint32_t address) {
  find_mbarrier(address, "mbarrier.inval");
  memset(shared_pointer(address, 8, "mbarrier.inval", 8), POISON, 8);
}

inline void end_phase_if_complete(MBarrier& m) {
  if (m.pending || m.bytes) return;
  m.phase++;
  m.pending = m.count;
}

inline void add_bytes(MBarrier& m, int64_t bytes, const char* operation) {
  m.bytes += bytes;
  if (m.bytes > MAX_PENDING_BYTES || m.bytes < -MAX_PENDING_BYTES)
    fail(kind::mbarrier, "%s: %lld bytes pending at mbarrier 0x%x, more than it can count", operation,
         static_cast<long long>(m.bytes), m.address);
}

// A copy that has landed calls it too, with no arrival and -bytes.
inline void update_mbarrier(MBarrier& m, int arrivals, int64_t bytes, const char* operation) {
  add_bytes(m, bytes, operation);
  if (arrivals > m.pending)
    fail(kind::mbarrier, "%s: mbarrier 0x%x gets more arrivals than the %d of its phase", operation, m.address,
         m.count);
  m.pending -= arrivals;
  end_phase_if_complete(m);
}

inline bool phase_ended(const MBarrier& m, uint32_t parity) { return (m.phase & 1) != (parity & 1); }

inline void wait_for_phase(uint32_t address, uint32_t parity) {
  MBarrier& m = find_mbarrier(address, "mbarrier.try_wait");
  while (!phase_ended(m, parity))
    wait_for(self(), &m.phase, m.phase, parity & 1 ? "mbarrier.try_wait parity 1 of" : "mbarrier.try_wait parity 0 of",
             address);
}

}  // namespace emulation
