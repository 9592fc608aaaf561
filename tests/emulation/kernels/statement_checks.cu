// The reader of asm templates as a function, for tests that hand it statements one by one.
#include "ptx/types.cuh"

// 1 where the statement is known and does what it says, else 0 and the reason in `error`.
extern "C" __attribute__((visibility("default"))) int check_statement(const char* text, const char* constraints,
                                                                      const char* clobbers, int is_volatile,
                                                                      char* error, uint64_t room) {
  const emulation::Statement statement{text, constraints, clobbers, is_volatile != 0, "", 0, nullptr};
  return emulation::read_statement(statement, error, room) != nullptr;
}

extern "C" __global__ void nothing() {}
