// Plain accesses: g++ and clang++ check each (-fsanitize=alignment), and call this if its type does not allow the
// address. A GPU then ends the launch with error 716, and the context is lost.
#pragma once

#include "emulation/shared_memory.cuh"

namespace emulation {
struct CheckedAccess {  // as the compilers lay it out for version 1 of the call
  const char* file;
  uint32_t line, column;
  const void* type;
  uint8_t log_alignment, what;
};
}  // namespace emulation

extern "C" [[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(const emulation::CheckedAccess* access,
                                                                   uintptr_t address) {
  using namespace emulation;
  const unsigned alignment = 1u << access->log_alignment;
  const void* pointer = reinterpret_cast<const void*>(address);
  if (is_shared(pointer))
    fail(kind::misaligned, "plain access: shared address 0x%x is not %u-byte aligned", shared_address_of(pointer),
         alignment);
  fail_at(kind::misaligned, pointer, "plain access", alignment);
}
