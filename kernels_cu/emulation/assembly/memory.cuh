// Loads, stores, atomics and reductions (PTX ISA 9.7.9 and 9.7.13): their readers and meanings.
#pragma once

#include "emulation/assembly/parser.cuh"
#include "emulation/bulk.cuh"
#include "emulation/passed_words.cuh"

namespace emulation {

// An access of `number` bytes at an address that is a multiple of them, by slots after or before the address.
inline void load_words(const Instruction& i, Frame& f, const char* data, uint32_t first) {
  const uint32_t count = i.slots.size - 1, bytes = i.number / count;
  for (uint32_t s = 0; s < count; s++) {
    uint32_t word;
    memcpy(&word, data + s * bytes, sizeof word);
    set_value(f, i.slots[first + s], word);
  }
}
inline void store_words(const Instruction& i, const Frame& f, char* to) {
  const uint32_t count = i.slots.size - 1, bytes = i.number / count;
  for (uint32_t s = 0; s < count; s++) {
    const uint32_t word = bytes == 2 ? value_of<uint16_t>(f, i.slots[1 + s]) : value_of<uint32_t>(f, i.slots[1 + s]);
    memcpy(to + s * bytes, &word, bytes);
  }
}

inline void load_from_shared(const Instruction& i, Frame& f) {
  char data[16];
  generic_load(value_of<uint32_t>(f, i.slots[i.slots.size - 1]), data, i.number, i.name);
  load_words(i, f, data, 0);
}
inline void store_to_shared(const Instruction& i, Frame& f) {
  char data[16];
  store_words(i, f, data);
  generic_store(value_of<uint32_t>(f, i.slots[0]), data, i.number, i.name, self().linear);
}
inline void load_from_global(const Instruction& i, Frame& f) {
  const char* from = value_of<const char*>(f, i.slots[i.slots.size - 1]);
  check_global(from, i.number, i.name, i.number);
  load_words(i, f, from, 0);
}
inline void store_to_global(const Instruction& i, Frame& f) {
  char* to = value_of<char*>(f, i.slots[0]);
  note_global_store(to, i.number, check_global(to, i.number, i.name, i.number));
  store_words(i, f, to);
}
inline void load_with_acquire(const Instruction& i, Frame& f) {
  const int* from = value_of<const int*>(f, i.slots[1]);
  check_global(from, 4, i.name, 4);
  poll();  // the thread that writes it gets a turn
  set_value(f, i.slots[0], pass_word(from, true, false, i.name, [from](int& after) {
              return after = __atomic_load_n(from, __ATOMIC_SEQ_CST);
            }));
}
inline void store_with_release(const Instruction& i, Frame& f) {
  int* to = value_of<int*>(f, i.slots[0]);
  check_global(to, 4, i.name, 4);
  pass_word(to, false, true, i.name, [to, value = value_of<int>(f, i.slots[1])](int& after) {
    after = value;
    return __atomic_exchange_n(to, value, __ATOMIC_SEQ_CST);
  });
}

inline int vector_length(Parser& p) { return p.is("v2") ? 2 : p.is("v4") ? 4 : 1; }

// ld.shared{.vec}.type, ld.global.nc{.L1::no_allocate}{.vec}.type, ld.acquire.gpu.global.type
inline void read_ld(Parser& p) {
  if (p.is("acquire")) {
    p.need("gpu");
    p.need("global");
    const Type type = p.need_type(" b32 u32 s32 ");
    p.writes(type, "result");
    p.address(64, "address");
    p.touches_memory();
    return p.means(load_with_acquire, "ld.acquire");
  }
  const bool shared = p.is("shared");
  if (!shared) {
    p.need("global");
    p.need("nc");
    p.is("L1::no_allocate");
  }
  const int count = vector_length(p);
  const Type type = p.need_type(" b32 u32 s32 f32 ");
  p.writes_vector(count, type, "result");
  p.address(shared ? 32 : 64, "address");
  if (shared) p.touches_memory();  // what .nc reads does not change (9.7.9.9)
  p.means(shared ? load_from_shared : load_from_global, shared ? "ld.shared" : "ld.global.nc", 4 * count);
}

// st.shared{.vec}.type, st.global{.vec}.type, st.release.gpu.global.type
inline void read_st(Parser& p) {
  p.touches_memory();
  if (p.is("release")) {
    p.need("gpu");
    p.need("global");
    const Type type = p.need_type(" b32 u32 s32 ");
    p.address(64, "address");
    p.reads(type, "value");
    return p.means(store_with_release, "st.release");
  }
  const char* const spaces[] = {"shared", "global"};
  const bool shared = p.choose(spaces) == 0;
  const int count = vector_length(p);
  const Type type = p.need_type(count == 1 && shared ? " b16 u16 s16 b32 u32 s32 f32 " : " b32 u32 s32 f32 ");
  p.address(shared ? 32 : 64, "address");
  p.reads_vector(count, type, "value");
  p.means(shared ? store_to_shared : store_to_global, shared ? "st.shared" : "st.global", type.bits / 8 * count);
}

// ---- atom.acq_rel.gpu.global.add.s32; red.release.gpu.global.add.s32, red.relaxed.gpu.global.add{.v4}.f32
inline int add_to_word(int* at, int summand, bool acquires, const char* what) {
  return pass_word(at, acquires, true, what, [at, summand](int& after) {
    const int before = __atomic_fetch_add(at, summand, __ATOMIC_SEQ_CST);
    after = before + summand;
    return before;
  });
}
inline void add_and_return(const Instruction& i, Frame& f) {
  int* at = value_of<int*>(f, i.slots[1]);
  check_global(at, 4, i.name, 4);
  set_value(f, i.slots[0], add_to_word(at, value_of<int>(f, i.slots[2]), true, i.name));
}
inline void read_atom(Parser& p) {
  p.need("acq_rel");
  p.need("gpu");
  p.need("global");
  p.need("add");
  const Type type = p.need_type(" u32 s32 ");
  p.writes(type, "old value");
  p.address(64, "address");
  p.reads(type, "summand");
  p.touches_memory();
  p.means(add_and_return, "atom.add");
}
inline void reduce_integer(const Instruction& i, Frame& f) {
  int* at = value_of<int*>(f, i.slots[0]);
  check_global(at, 4, i.name, 4);
  add_to_word(at, value_of<int>(f, i.slots[1]), false, i.name);
}
inline void reduce_floats(const Instruction& i, Frame& f) {
  float* at = value_of<float*>(f, i.slots[0]);
  note_global_store(at, 4 * i.number, check_global(at, 4 * i.number, i.name, 4 * i.number));
  for (int s = 0; s < i.number; s++) add_float(at + s, value_of<float>(f, i.slots[1 + s]));
}
inline void read_red(Parser& p) {
  const char* const orders[] = {"release", "relaxed"};
  const int order = p.choose(orders);
  p.need("gpu");
  p.need("global");
  p.need("add");
  p.touches_memory();
  const int count = order ? vector_length(p) : 1;
  const Type type = p.need_type(order ? " f32 " : " u32 s32 ");
  p.address(64, "address");
  p.reads_vector(count, type, "summand");
  p.means(order ? reduce_floats : reduce_integer, order ? "red.add.f32" : "red.add", count);
}

}  // namespace emulation
