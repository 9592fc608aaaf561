// Every instruction that the emulated device knows, and the reader of whole statements.
#pragma once

#include "emulation/assembly/arithmetic.cuh"
#include "emulation/assembly/checks.cuh"
#include "emulation/assembly/copies.cuh"
#include "emulation/assembly/matrices.cuh"
#include "emulation/assembly/memory.cuh"
#include "emulation/assembly/synchronisation.cuh"

namespace emulation {

inline void read_instruction(Parser& p) {
  struct Reader {
    const char* opcode;
    void (*read)(Parser&);
  };
  static const Reader readers[] = {{"atom", read_atom},
                                   {"bar", read_bar},
                                   {"bra", read_bra},
                                   {"cp", read_cp},
                                   {"cvt", read_cvt},
                                   {"cvta", read_cvta},
                                   {"elect", read_elect},
                                   {"ex2", read_approximate<power_of_two>},
                                   {"fence", read_fence},
                                   {"fma", read_fma},
                                   {"griddepcontrol", read_griddepcontrol},
                                   {"ld", read_ld},
                                   {"ldmatrix", read_ldmatrix},
                                   {"lg2", read_approximate<binary_logarithm>},
                                   {"mbarrier", read_mbarrier},
                                   {"mma", read_mma},
                                   {"mov", read_mov},
                                   {"movmatrix", read_movmatrix},
                                   {"mul", read_mul},
                                   {"prefetch", read_prefetch},
                                   {"rcp", read_approximate<reciprocal>},
                                   {"red", read_red},
                                   {"selp", read_selp},
                                   {"setmaxnreg", read_setmaxnreg},
                                   {"setp", read_setp},
                                   {"st", read_st},
                                   {"stmatrix", read_stmatrix},
                                   {"wgmma", read_wgmma}};
  const size_t length = static_cast<size_t>(p.modifier - p.opcode);
  for (const Reader& r : readers)
    if (strlen(r.opcode) == length && !strncmp(r.opcode, p.opcode, length)) return r.read(p);
  p.refuse("the instruction '%s' is not known", p.opcode);
}

Program* read_statement(const Statement& statement, char* error, size_t room) {
  Parser* p = static_cast<Parser*>(calloc(1, sizeof(Parser)));
  Program* program = static_cast<Program*>(calloc(1, sizeof(Program)));
  if (!p || !program) abort();
  p->statement = &statement;
  p->at = statement.text;
  p->program = program;
  p->error = error;
  p->room = room;
  for (int o = 0; o < MAX_OPERANDS; o++)
    p->usage.first_read[o] = p->usage.last_read[o] = p->usage.first_write[o] = p->usage.last_write[o] = -1;
  if (setjmp(p->refused) == 0) {
    read_constraints(*p);
    read_template(*p);
    resolve_branches(*p);
    check_statement(*p);
    free(p);
    return program;
  }
  free(p);  // a refusal ends the launch, so the memory of the parts is not freed
  return nullptr;
}

}  // namespace emulation
