// What a compiler assumes of an asm statement and does not check: NVRTC trusts the constraints, clobbers and
// "volatile" (Inline PTX Assembly in CUDA; GCC's manual, Extended Asm). A statement that does not do what it declares
// is refused.
#pragma once

#include "emulation/assembly/parser.cuh"

namespace emulation {

inline bool clobbers_memory(const char* clobbers) {
  for (const char* c = clobbers; (c = strstr(c, "memory")) != nullptr; c += 6)
    if ((c == clobbers || c[-1] == ',') && (c[6] == 0 || c[6] == ',')) return true;
  return false;
}

inline void check_output(Parser& p, int o) {
  const char* c = p.constraint[o];
  const Usage& u = p.usage;
  const bool in_and_out = c[0] == '+';
  const bool early = c[1] == '&';
  if (u.first_write[o] < 0) p.refuse("%%%d is an output (\"%s\") that no instruction writes", o, c);
  if (!in_and_out && u.first_read[o] >= 0 && u.first_read[o] <= u.first_write[o])
    p.refuse("%%%d is read before it is written, and its constraint \"%s\" has no '+'", o, c);
  if (in_and_out && u.first_read[o] < 0) p.refuse("%%%d is never read, and its constraint \"%s\" has a '+'", o, c);
  if (early) return;
  // Its register may be that of an input, unless '&' forbids it.
  const int last = static_cast<int>(p.program->instructions.size) - 1;
  for (int i = 0; i < p.operands; i++) {
    const bool input = p.constraint[i][0] != '=' && p.constraint[i][0] != '+';
    if (!input || u.last_read[i] < 0) continue;
    if (u.last_read[i] > u.first_write[o] || (u.jumps_back && u.first_write[o] < last))
      p.refuse("%%%d is written before %%%d is read for the last time, and its constraint \"%s\" has no '&'", o, i, c);
  }
}

// No instruction: it pins registers to a place, so nothing may be moved across it, and each is read and written.
inline void check_pin(Parser& p) {
  if (!p.statement->is_volatile || !clobbers_memory(p.statement->clobbers))
    p.refuse("an empty template holds nothing in place unless it is volatile and clobbers \"memory\"");
  for (int o = 0; o < p.operands; o++)
    if (p.constraint[o][0] != '+') p.refuse("%%%d is pinned, and its constraint \"%s\" has no '+'", o, p.constraint[o]);
}

inline void check_statement(Parser& p) {
  const Statement& s = *p.statement;
  if (p.program->instructions.empty()) return check_pin(p);
  bool outputs = false;
  for (int o = 0; o < p.operands; o++) {
    const bool output = p.constraint[o][0] == '=' || p.constraint[o][0] == '+';
    outputs |= output;
    if (output) check_output(p, o);
    else if (p.usage.first_write[o] >= 0) p.refuse("%%%d is an input (\"%s\") that is written", o, p.constraint[o]);
    else if (p.usage.first_read[o] < 0) p.refuse("%%%d is an input that no instruction reads", o);
  }
  if (p.usage.has_effect && !s.is_volatile) p.refuse("it has an effect besides its outputs and is not volatile");
  if (p.usage.touches_memory && !clobbers_memory(s.clobbers))
    p.refuse("it touches memory and does not clobber \"memory\"");
  if (!p.usage.has_effect && !outputs) p.refuse("it has neither an output nor an effect");
}

}  // namespace emulation
