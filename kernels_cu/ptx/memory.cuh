// Shared memory by 32-bit address, and wide accesses to global memory. Values travel as bits: see as_bits / as_float.
#pragma once

#include "ptx/types.cuh"

namespace ptx {

// The 32-bit address that the instructions of this folder take.
WRAPPER uint32_t shared_address(const void* pointer) {
  uint32_t address;
  asm("{\n.reg .u64 t;\ncvta.to.shared.u64 t, %1;\ncvt.u32.u64 %0, t;\n}" : "=r"(address) : "l"(pointer));
  return address;
}

// ---- shared memory; the address is a multiple of the bytes moved
WRAPPER uint32_t load_shared(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
WRAPPER float load_shared_f32(uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}
WRAPPER void load_shared_v2(uint32_t (&v)[2], uint32_t address) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v[0]), "=r"(v[1]) : "r"(address) : "memory");
}
WRAPPER void load_shared_v4(uint32_t (&v)[4], uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(address)
               : "memory");
}
WRAPPER void store_shared_u16(uint32_t address, uint16_t v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(v) : "memory");
}
WRAPPER void store_shared(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
WRAPPER void store_shared_f32(uint32_t address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
WRAPPER void store_shared_v2(uint32_t address, const uint32_t (&v)[2]) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(v[0]), "r"(v[1]) : "memory");
}
WRAPPER void store_shared_v4(uint32_t address, const uint32_t (&v)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

// ---- global memory, 16 bytes at an address that is a multiple of 16
// Read-only data that no other thread of the launch writes. It bypasses L1, for streams read once.
WRAPPER void load_global_v4(uint32_t (&v)[4], const void* pointer) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "l"(pointer));
}
WRAPPER void store_global_v4(void* pointer, const uint32_t (&v)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}

}  // namespace ptx
