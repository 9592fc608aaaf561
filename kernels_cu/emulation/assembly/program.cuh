// An asm template in the form that runs: instructions with their operands resolved to registers and constants.
#pragma once

#include "emulation/assembly/statement.cuh"
#include "emulation/system.cuh"

namespace emulation {

constexpr int MAX_LOCALS = 8;  // registers that one template declares

// A type of the PTX ISA (5.2). kind: 'b' bits, 'u', 's', 'f' or 'p', a predicate, which has one bit.
struct Type {
  char kind;
  int bits;
};
constexpr Type PREDICATE{'p', 1}, B16{'b', 16}, B32{'b', 32}, B64{'b', 64}, U32{'u', 32}, S32{'s', 32}, U64{'u', 64},
    F32{'f', 32}, U16{'u', 16};

// Where a value is: an operand of the statement, a register that the template declares, or a number in the template.
struct Slot {
  enum Kind : uint8_t { operand, local, constant, nothing } kind;
  uint16_t index;
  int64_t value;
};

struct Frame {
  const void* const* operand;
  uint64_t local[MAX_LOCALS];
  int next;  // the instruction that follows
};

struct Instruction;
typedef void (*Meaning)(const Instruction&, Frame&);

// guard: the predicate that it runs under, negated if guard_negated. slots: its operands' values, those of a register
// list one after another. number, flags: what its modifiers say, only for its meaning.
struct Instruction {
  Meaning meaning;
  Slot guard;
  bool guard_negated;
  List<Slot> slots;
  const char* name;
  int number, flags;
};

struct Program {
  List<Instruction> instructions;
};

template <class T>
inline T value_of(const Frame& frame, const Slot& slot) {
  T value;
  const void* at = slot.kind == Slot::operand ? frame.operand[slot.index]
                   : slot.kind == Slot::local ? static_cast<const void*>(&frame.local[slot.index])
                                              : &slot.value;
  memcpy(&value, at, sizeof value);
  return value;
}

template <class T>
inline void set_value(Frame& frame, const Slot& slot, T value) {
  if (slot.kind == Slot::operand) memcpy(const_cast<void*>(frame.operand[slot.index]), &value, sizeof value);
  if (slot.kind == Slot::local) memcpy(&frame.local[slot.index], &value, sizeof value);
}

inline bool predicate(const Frame& frame, const Slot& slot) { return value_of<uint8_t>(frame, slot) != 0; }

inline void run(const Program& program, Frame& frame) {
  const int count = static_cast<int>(program.instructions.size);
  for (int at = 0; at < count; at = frame.next) {
    const Instruction& i = program.instructions[at];
    frame.next = at + 1;
    if (i.guard.kind != Slot::nothing && predicate(frame, i.guard) == i.guard_negated) continue;
    i.meaning(i, frame);
  }
}

}  // namespace emulation
