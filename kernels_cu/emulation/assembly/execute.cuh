// Reads an asm statement at its first execution and runs it at each: what kernels' asm means on the emulated device.
#pragma once

#include "emulation/assembly/instructions.cuh"

namespace emulation {

__attribute__((noinline)) inline Program* first_program(Statement& statement) {
  char error[600];
  Program* program = read_statement(statement, error, sizeof error);
  if (!program) fail(kind::assembly, "%s:%d: %s, in \"%.300s\"", statement.file, statement.line, error, statement.text);
  __atomic_store_n(&statement.program, program, __ATOMIC_RELEASE);
  return program;
}

void execute(Statement& statement, const void* const* operands) {
  const Program* program = __atomic_load_n(&statement.program, __ATOMIC_ACQUIRE);
  if (!program) program = first_program(statement);
  self().statement = __builtin_return_address(0);
  Frame frame;
  frame.operand = operands;
  run(*program, frame);
}

}  // namespace emulation
