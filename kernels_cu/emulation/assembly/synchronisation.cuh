// Barriers, mbarriers, fences, and what warps agree on (PTX ISA 9.7.13, 9.7.19): their readers and meanings.
#pragma once

#include "emulation/assembly/parser.cuh"
#include "emulation/mbarrier.cuh"

namespace emulation {

// ---- bar.sync a {, threads}; bar.arrive a, threads: aligned forms, which all lanes of a warp execute together (9.7.13.1)
inline void meet_at_barrier(const Instruction& i, Frame& f) {
  LaneOrder& order = self().block->order[self().warp];
  once_a_warp(i.number == 0 ? "bar.sync" : "bar.arrive", [&order] { release_warp(order); });
  const uint32_t arrived = order.released[self().lane];
  arrive_at_barrier(value_of<int>(f, i.slots[0]), i.slots.size > 1 ? value_of<int>(f, i.slots[1]) : -1, i.number == 0);
  if (i.number == 0) order.together = upper(order.together, arrived);
}
inline void read_bar(Parser& p) {
  const char* const kinds[] = {"sync", "arrive"};
  const int kind = p.choose(kinds);
  p.reads(U32, "barrier");
  if (kind == 1 || p.has_more()) p.reads(U32, "number of threads");
  p.touches_memory();
  p.means(meet_at_barrier, "barrier", kind);
}

// ---- mbarrier
inline uint32_t mbarrier_of(const Instruction& i, const Frame& f, uint32_t slot = 0) {
  return value_of<uint32_t>(f, i.slots[slot]);
}
inline void start_mbarrier(const Instruction& i, Frame& f) {
  init_mbarrier(mbarrier_of(i, f), value_of<int>(f, i.slots[1]));
}
inline void end_mbarrier(const Instruction& i, Frame& f) { invalidate_mbarrier(mbarrier_of(i, f)); }
// Slots: the state before the arrival, which is not modelled, the mbarrier, and bytes to expect. The bytes are counted
// before the arrival (9.7.13.15.10).
inline void arrive_at_mbarrier(const Instruction& i, Frame& f) {
  set_value(f, i.slots[0], uint64_t(0));
  const int64_t bytes = i.slots.size > 2 ? value_of<uint32_t>(f, i.slots[2]) : 0;
  release_lane(*self().block, self().linear);
  update_mbarrier(find_mbarrier(mbarrier_of(i, f, 1), i.name), 1, bytes, i.name);
}
inline void expect_bytes(const Instruction& i, Frame& f) {
  add_bytes(find_mbarrier(mbarrier_of(i, f), i.name), value_of<uint32_t>(f, i.slots[1]), i.name);
}
// try_wait may wait a while before it fails. With random deliveries it fails now and then; else it waits until the
// phase has ended. A loop around it waits at some time, so that a deadlock is noticed.
inline void wait_for_parity(const Instruction& i, Frame& f) {
  const uint32_t address = mbarrier_of(i, f, 1), parity = value_of<uint32_t>(f, i.slots[2]);
  Block& block = *self().block;
  uint8_t passed = 1;
  if (block.request->delivery == Delivery::random && block.random.one_in(4))
    passed = phase_ended(find_mbarrier(address, i.name), parity);
  else wait_for_phase(address, parity);
  if (passed) acquire_lane(block, self().linear);
  set_value(f, i.slots[0], passed);
}
inline void read_mbarrier(Parser& p) {
  p.touches_memory();
  const char* const operations[] = {"init", "inval", "arrive", "expect_tx", "try_wait"};
  const int operation = p.choose(operations);
  const bool expects = operation == 2 && p.is("expect_tx");
  if (operation == 3) p.needs("relaxed", "cta");
  if (operation == 4) p.need("parity");
  p.need("shared::cta");
  p.need("b64");
  if (operation == 2) p.writes(B64, "state", true);
  if (operation == 4) p.writes(PREDICATE, "result");
  p.address(32, "mbarrier");
  if (operation == 0) p.reads(U32, "number of arrivals");
  if (operation == 3 || expects) p.reads(U32, "number of bytes");
  if (operation == 4) p.reads(U32, "parity");
  constexpr Meaning meanings[] = {start_mbarrier, end_mbarrier, arrive_at_mbarrier, expect_bytes, wait_for_parity};
  static const char* const names[] = {"mbarrier.init", "mbarrier.inval", "mbarrier.arrive", "mbarrier.expect_tx",
                                      "mbarrier.try_wait"};
  p.means(meanings[operation], expects ? "mbarrier.arrive.expect_tx" : names[operation]);
}

// ---- fence.proxy.async{.shared::cta|.global}, fence.mbarrier_init.release.cluster
inline void fence_shared(const Instruction&, Frame&) {
  self().block->mbarrier_init_unfenced = false;
  publish_writes(self());
}
inline void fence_global(const Instruction&, Frame&) { publish_global_stores(self()); }
inline void fence_both(const Instruction& i, Frame& f) {
  fence_shared(i, f);
  fence_global(i, f);
}
inline void fence_initialisation(const Instruction&, Frame&) { self().block->mbarrier_init_unfenced = false; }
inline void read_fence(Parser& p) {
  p.touches_memory();
  if (p.is("mbarrier_init")) {
    p.need("release");
    p.need("cluster");
    return p.means(fence_initialisation, "fence.mbarrier_init");
  }
  p.need("proxy");
  p.need("async");
  const bool global = p.is("global"), shared = !global && p.is("shared::cta");
  p.means(global ? fence_global : shared ? fence_shared : fence_both, "fence.proxy.async");
}

// ---- elect.sync d|p, mask: the lowest lane of the mask
inline void elect_lane(const Instruction& i, Frame& f) {
  const uint32_t mask = value_of<uint32_t>(f, i.slots[2]);
  int nothing = 0;
  collective("elect.sync", mask, nothing, [](int**) {});
  const int lowest = __ffs(static_cast<int>(mask)) - 1;
  set_value(f, i.slots[0], uint32_t(lowest));
  set_value(f, i.slots[1], uint8_t(self().lane == lowest));
}
inline void read_elect(Parser& p) {
  p.need("sync");
  Argument& pair = p.take("result");
  if (pair.kind != Argument::pair) p.refuse("%s: the result is no pair of a register and a predicate", p.opcode);
  p.define(pair.inner[0], B32, "leader", true);
  p.define(pair.inner[1], PREDICATE, "predicate");
  p.reads(B32, "mask");
  p.has_effect();
  p.means(elect_lane, "elect.sync");
}

// ---- setmaxnreg.inc|dec.sync.aligned.u32 (9.7.20.5): registers move through a pool of the block. Only their number is
// modelled. number: whether it gives away
inline void move_registers(const Instruction& i, Frame& f) {
  const int count = value_of<int>(f, i.slots[0]);
  if (count % 8 || count < 24 || count > 256)
    fail(kind::assembly, "%s: %d registers is no multiple of 8 from 24 to 256", i.name, count);
  Block& block = *self().block;
  Warp& warp = block.warp[self().warp];
  if (i.number) {
    once_a_warp(i.name, [&] {
      if (count > warp.registers)
        fail(kind::assembly, "%s: the warp has %d registers a thread, and is to keep %d", i.name, warp.registers, count);
      block.free_registers += 32 * (warp.registers - count);
      block.registers_given++;
      warp.registers = count;
    });
    return;
  }
  gather_warp(i.name);
  while (warp.registers < count) {  // the first lane that finds enough takes them for all
    const int wanted = 32 * (count - warp.registers);
    if (block.free_registers >= wanted) {
      block.free_registers -= wanted;
      warp.registers = count;
    } else {
      wait_for(self(), &block.registers_given, block.registers_given, i.name);
    }
  }
  gather_warp(i.name);
}
inline void read_setmaxnreg(Parser& p) {
  const char* const directions[] = {"inc", "dec"};
  const int direction = p.choose(directions);
  p.needs("sync", "aligned", "u32");
  p.number_in(24, 256, "number of registers");
  p.has_effect();
  p.means(move_registers, direction ? "setmaxnreg.dec" : "setmaxnreg.inc", direction);
}

// ---- griddepcontrol.wait, .launch_dependents: launches never overlap here
inline void read_griddepcontrol(Parser& p) {
  const char* const kinds[] = {"wait", "launch_dependents"};
  p.choose(kinds);
  p.touches_memory();
  p.means([](const Instruction&, Frame&) {}, "griddepcontrol");
}

}  // namespace emulation
