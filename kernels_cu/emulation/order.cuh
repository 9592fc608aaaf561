// What orders the accesses of a warp's lanes to shared memory: __syncwarp, barriers, and the release and acquire of
// mbarriers and of global memory (PTX ISA 8.9, 9.7.13). ldmatrix, stmatrix, shuffles, votes and products bring lanes
// together and order nothing. An access that conflicts with another lane's, and that nothing orders, is a race,
// whatever the schedule has made of it.
//
// Each warp has its own time, which advances when lanes release what they did. What a lane has released to anyone
// counts as released to all of its warp, so that orders which go through other warps need not be followed.
#pragma once

#include "emulation/scheduler.cuh"

namespace emulation {

// ---- who touched a word last: lanes of one warp, at a time of that warp. collective: stmatrix or ldmatrix, in which each
// lane may have touched it.
constexpr uint32_t TIME_BITS = 26, LATEST = (1u << TIME_BITS) - 1;

inline uint64_t touch_of(uint32_t lanes, int warp, uint32_t time, bool collective) {
  return uint64_t(lanes) << 32 | uint32_t(collective) << 31 | uint32_t(warp) << TIME_BITS | time;
}
inline uint32_t lanes_of(uint64_t touch) { return uint32_t(touch >> 32); }
inline bool is_collective(uint64_t touch) { return touch >> 31 & 1; }
inline int warp_of(uint64_t touch) { return int(touch >> TIME_BITS & 31); }
inline uint32_t time_of(uint64_t touch) { return uint32_t(touch) & LATEST; }

// ---- time
inline void pass_time(LaneOrder& order) { order.time += order.time < LATEST; }

// Blocks of a worker run one after another: all lanes know what was before, so that nothing has to be cleared.
inline void start_orders(Block& block) {
  TouchedMemory& memory = *block.touched;
  if (memory.time > LATEST / 2) {
    memset(&memory, 0, sizeof memory);
    memset(block.order, 0, sizeof block.order);
  }
  memset(memory.any, 0, sizeof memory.any);
  memory.time++;
  for (int i = 0; i < block.warp_count; i++) {
    block.order[i].together = memory.time;
    block.order[i].time = memory.time + 1;
  }
}
inline void end_orders(Block& block) {
  for (int i = 0; i < block.warp_count; i++) block.touched->time = upper(block.touched->time, block.order[i].time);
}

inline void release_lane(Block& block, int thread) {
  LaneOrder& order = block.order[thread / 32];
  const uint32_t* known = order.known[thread % 32];
  for (int lane = 0; lane < 32; lane++)
    order.released[lane] = upper(upper(order.released[lane], known[lane]), order.together);
  order.released[thread % 32] = order.time;
  pass_time(order);
}
inline void acquire_lane(Block& block, int thread) {
  LaneOrder& order = block.order[thread / 32];
  uint32_t* known = order.known[thread % 32];
  for (int lane = 0; lane < 32; lane++) known[lane] = upper(known[lane], order.released[lane]);
}

// For all lanes, which are at one instruction.
inline void release_warp(LaneOrder& order) {
  for (uint32_t& released : order.released) released = order.time;
  pass_time(order);
}
inline void bring_together(LaneOrder& order) {
  order.together = order.time;
  pass_time(order);
}
inline void bring_together(Warp& warp, LaneOrder& order, uint32_t mask) {
  if ((mask & warp.lanes) == warp.lanes) return bring_together(order);
  uint32_t known[32];
  for (int lane = 0; lane < 32; lane++) known[lane] = mask >> lane & 1 ? order.time : order.together;
  for (int of = 0; of < 32; of++)
    for (int lane = 0; mask >> of & 1 && lane < 32; lane++) known[lane] = upper(known[lane], order.known[of][lane]);
  for (int of = 0; of < 32; of++)
    if (mask >> of & 1) memcpy(order.known[of], known, sizeof known);
  pass_time(order);
}

// Whether a thread knows what another did at a time of its warp.
inline bool knows(const Block& block, const Fiber& fiber, int thread, uint32_t time) {
  const LaneOrder& order = block.order[thread / 32];
  if (fiber.warp != thread / 32) return time <= order.released[thread % 32];
  return thread == fiber.linear || time <= order.together || time <= order.known[fiber.lane][thread % 32];
}

// ---- checks
// A lane of `lanes` whose touch `lane` does not know of, or -1.
inline int unknown_to(const LaneOrder& order, int lane, uint32_t lanes, uint32_t time) {
  for (uint32_t rest = lanes & ~(1u << lane); rest; rest &= rest - 1) {
    const int other = __builtin_ctz(rest);
    if (order.known[lane][other] < time) return other;
  }
  return -1;
}

[[noreturn]] __attribute__((noinline)) inline void fail_unordered(const char* what, uint32_t address, uint64_t before,
                                                                  int lane, bool wrote) {
  char who[16] = "all lanes";
  if (!is_collective(before)) snprintf(who, sizeof who, "lane %d", lane);
  fail(kind::race, "%s at shared address 0x%x, which %s of the warp %s: no __syncwarp or barrier orders the two", what,
       address, who, wrote ? "wrote" : "read");
}

// lanes: that touch the word now.
inline void check_ordered(const LaneOrder& order, int warp, uint64_t before, uint32_t lanes, bool collective, bool wrote,
                          uint32_t address, const char* what) {
  const uint32_t time = time_of(before);
  if (time <= order.together || warp_of(before) != warp) return;
  if (is_collective(before) ? collective : lanes_of(before) == lanes) return;
  for (uint32_t rest = lanes; rest; rest &= rest - 1) {
    const int other = unknown_to(order, __builtin_ctz(rest), lanes_of(before), time);
    if (other >= 0) fail_unordered(what, address, before, other, wrote);
  }
}

// Lanes that read a word before `lane` does, and have neither released that nor made it known to `lane`.
inline uint32_t other_readers(const LaneOrder& order, int warp, int lane, uint64_t before) {
  if (time_of(before) <= order.together || warp_of(before) != warp) return 0;
  uint32_t lanes = 0;
  for (uint32_t rest = lanes_of(before); rest; rest &= rest - 1) {
    const int other = __builtin_ctz(rest);
    if (upper(order.released[other], order.known[lane][other]) < time_of(before)) lanes |= rest & -rest;
  }
  return lanes;
}

// The words of an access.
template <uint32_t WORDS>
struct Touching {
  const LaneOrder& order;
  uint64_t mine;
  uint64_t* wrote;
  uint64_t* read;

  // Whether the warp has touched one of them since all its lanes knew.
  bool any_recent(const uint64_t* touches) const {
    const uint32_t known = uint32_t(warp_of(mine)) << TIME_BITS | order.together, most = LATEST - order.together;
    bool recent = false;
    for (uint32_t i = 0; i < WORDS; i++) recent |= (uint32_t(touches[i]) & ~(1u << 31)) - known - 1 < most;
    return recent;
  }
};
template <uint32_t WORDS>
inline Touching<WORDS> touching(Block& block, int warp, uint32_t lanes, bool collective, uint32_t address) {
  const LaneOrder& order = block.order[warp];
  block.touched->any[(address - SHARED_BASE) / TOUCHED_LINE] = true;
  SharedUnit& unit = block.touched->unit[(address - SHARED_BASE) / 16];
  const uint32_t first = WORDS == 4 ? 0 : address / 4 % 4;
  return {order, touch_of(lanes, warp, order.time, collective), unit.wrote + first, unit.read + first};
}

// A read. lanes: one, or those of a warp that execute ldmatrix.
template <uint32_t WORDS>
inline void note_read(Block& block, int warp, uint32_t lanes, bool collective, uint32_t address, const char* what) {
  const Touching<WORDS> t = touching<WORDS>(block, warp, lanes, collective, address);
  if (t.any_recent(t.wrote))
    for (uint32_t i = 0; i < WORDS; i++) {
      // A lane knows what it wrote itself, even if others wrote the same beside it.
      if (is_collective(t.wrote[i]) || !(lanes_of(t.wrote[i]) & lanes) || collective)
        check_ordered(t.order, warp, t.wrote[i], lanes, false, true, address, what);
    }
  const bool merges = !collective && t.any_recent(t.read);
  for (uint32_t i = 0; i < WORDS; i++)
    t.read[i] = merges ? t.mine | uint64_t(other_readers(t.order, warp, __builtin_ctz(lanes), t.read[i])) << 32 : t.mine;
}
inline void note_read(Block& block, int warp, uint32_t lanes, uint32_t address, uint32_t bytes, const char* what) {
  if (bytes == 16) note_read<4>(block, warp, lanes, false, address, what);
  else if (bytes == 8) note_read<2>(block, warp, lanes, false, address, what);
  else if (bytes == 4) note_read<1>(block, warp, lanes, false, address, what);
}

// A write, before it happens. data: what is written; the same value again changes nothing.
template <uint32_t WORDS>
inline void note_write(Block& block, int warp, uint32_t lanes, bool collective, uint32_t address, const char* data,
                       const char* there, const char* what) {
  const Touching<WORDS> t = touching<WORDS>(block, warp, lanes, collective, address);
  const bool recent = t.any_recent(t.wrote) || t.any_recent(t.read);
  for (uint32_t i = 0; i < WORDS; i++) {
    if (recent && !memcmp(data + 4 * i, there + 4 * i, 4)) {
      if (time_of(t.wrote[i]) <= t.order.together || warp_of(t.wrote[i]) != warp) t.wrote[i] = t.mine;
      else if (!is_collective(t.wrote[i])) t.wrote[i] |= uint64_t(lanes) << 32;
      continue;
    }
    if (recent) {
      check_ordered(t.order, warp, t.wrote[i], lanes, collective, true, address, what);
      check_ordered(t.order, warp, t.read[i], lanes, collective, false, address, what);
    }
    t.wrote[i] = t.mine;
    t.read[i] = 0;
  }
}
inline void note_write(Block& block, int warp, uint32_t lanes, bool collective, uint32_t address, uint32_t bytes,
                       const void* data, const void* there, const char* what) {
  const char *from = static_cast<const char*>(data), *to = static_cast<const char*>(there);
  if (bytes == 16) note_write<4>(block, warp, lanes, collective, address, from, to, what);
  else if (bytes == 8) note_write<2>(block, warp, lanes, collective, address, from, to, what);
  else if (bytes == 4) note_write<1>(block, warp, lanes, collective, address, from, to, what);
}

// Notes that an earlier write of a lane has landed.
inline void note_landing(Block& block, int thread, uint32_t address, uint32_t bytes) {
  const Touching<1> t = touching<1>(block, thread / 32, 1u << thread % 32, false, address);
  for (uint32_t i = 0; i < bytes / 4; i++) t.wrote[i] = t.mine;
}

// Threads of any warp that have read what the async proxy is about to overwrite must have released that.
inline void check_released(const Block& block, uint64_t read, uint32_t address, const char* what) {
  for (uint32_t rest = lanes_of(read); rest; rest &= rest - 1) {
    const int thread = warp_of(read) * 32 + __builtin_ctz(rest);
    if (knows(block, self(), thread, time_of(read))) continue;
    fail(kind::race, "%s over shared address 0x%x, which thread %d reads and has not released", what, address,
         thread);
  }
}
inline void claim_order(Block& block, uint32_t address, uint32_t bytes, const char* what) {
  for (uint32_t at = address; at < address + bytes; at += 16) {
    const uint32_t line = (at - SHARED_BASE) / TOUCHED_LINE;
    if (!block.touched->any[line]) {
      at += TOUCHED_LINE - 16 - (at - SHARED_BASE) % TOUCHED_LINE;
      continue;
    }
    SharedUnit& unit = block.touched->unit[(at - SHARED_BASE) / 16];
    for (uint64_t& read : unit.read) {
      if (time_of(read) > block.touched->time) check_released(block, read, at, what);
      read = 0;
    }
    memset(unit.wrote, 0, sizeof unit.wrote);
  }
}

}  // namespace emulation
