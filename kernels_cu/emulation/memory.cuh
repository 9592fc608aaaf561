// Host twins of ptx/memory.cuh.
#pragma once

#include "emulation/collective.cuh"

namespace ptx {

DEVICE uint32_t shared_address(const void* pointer) { return emulation::shared_address_of(pointer); }

DEVICE uint32_t load_shared(uint32_t address) {
  uint32_t v;
  memcpy(&v, emulation::shared_pointer(address, 4, "ld.shared", 4), 4);
  return v;
}
DEVICE float load_shared_f32(uint32_t address) {
  float v;
  memcpy(&v, emulation::shared_pointer(address, 4, "ld.shared", 4), 4);
  return v;
}
DEVICE void load_shared_v2(uint32_t (&v)[2], uint32_t address) {
  memcpy(v, emulation::shared_pointer(address, 8, "ld.shared.v2", 8), 8);
}
DEVICE void load_shared_v4(uint32_t (&v)[4], uint32_t address) {
  memcpy(v, emulation::shared_pointer(address, 16, "ld.shared.v4", 16), 16);
}

DEVICE void store_shared_u16(uint32_t address, uint16_t v) {
  emulation::generic_store(address, &v, 2, "st.shared.u16", emulation::self().linear);
}
DEVICE void store_shared(uint32_t address, uint32_t v) {
  emulation::generic_store(address, &v, 4, "st.shared", emulation::self().linear);
}
DEVICE void store_shared_f32(uint32_t address, float v) {
  emulation::generic_store(address, &v, 4, "st.shared", emulation::self().linear);
}
DEVICE void store_shared_v2(uint32_t address, const uint32_t (&v)[2]) {
  emulation::generic_store(address, v, 8, "st.shared.v2", emulation::self().linear);
}
DEVICE void store_shared_v4(uint32_t address, const uint32_t (&v)[4]) {
  emulation::generic_store(address, v, 16, "st.shared.v4", emulation::self().linear);
}

DEVICE void load_global_v4(uint32_t (&v)[4], const void* pointer) {
  emulation::check_global(pointer, 16, "ld.global.v4", 16);
  memcpy(v, pointer, 16);
}
DEVICE void store_global_v4(void* pointer, const uint32_t (&v)[4]) {
  emulation::check_global(pointer, 16, "st.global.v4", 16);
  memcpy(pointer, v, 16);
}

}  // namespace ptx
