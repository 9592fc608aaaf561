// ldmatrix, stmatrix, movmatrix.
#pragma once

#include "emulation/collective.cuh"

namespace emulation {

struct MatrixAccess {
  uint32_t row;
  uint32_t* load;
  const uint32_t* store;
};

// What lane l holds of an 8x8 matrix.
inline uint32_t held_by(const uint16_t (&m)[8][8], int l, bool transposed) {
  int i = l / 4, j = l % 4 * 2;
  uint32_t low = transposed ? m[j][i] : m[i][j], high = transposed ? m[j + 1][i] : m[i][j + 1];
  return low | high << 16;
}
inline void hold(uint16_t (&m)[8][8], int l, bool transposed, uint32_t bits) {
  int i = l / 4, j = l % 4 * 2;
  (transposed ? m[j][i] : m[i][j]) = static_cast<uint16_t>(bits);
  (transposed ? m[j + 1][i] : m[i][j + 1]) = static_cast<uint16_t>(bits >> 16);
}

// The following work is done for that lane of the warp.
inline void blame_lane(int lane) {
  const Fiber& fiber = self();
  if (lane == fiber.lane) return blame_running(*fiber.block);
  const Fiber& other = *fiber.block->fiber[fiber.warp * 32 + lane];
  blame(*fiber.block, other.linear, other.statement);
}

// Eight elements, which go to several lanes.
inline void load_row(uint16_t (&row)[8], uint32_t address, const char* operation) {
  const Fiber& fiber = self();
  Block& block = *fiber.block;
  memcpy(row, shared_pointer(address, 16, operation, 16), 16);
  if (address < STATIC_SHARED_BASE) note_read<4>(block, fiber.warp, block.warp[fiber.warp].lanes, true, address, operation);
}

__attribute__((noinline)) inline void load_matrices(const char* operation, uint32_t* r, int count, uint32_t row,
                                                    bool transposed) {
  MatrixAccess mine{row, r, nullptr};
  collective(operation, ~0u, mine, [&](MatrixAccess** lane) {
    for (int i = 0; i < count; i++) {
      uint16_t m[8][8];
      for (int k = 0; k < 8; k++) {
        blame_lane(8 * i + k);
        load_row(m[k], lane[8 * i + k]->row, operation);
      }
      for (int l = 0; l < 32; l++) lane[l]->load[i] = held_by(m, l, transposed);
    }
    blame_running(*self().block);
  });
}

// The lane that gives a row's address counts as its writer.
__attribute__((noinline)) inline void store_matrices(const char* operation, const uint32_t* r, int count, uint32_t row,
                                                     bool transposed) {
  MatrixAccess mine{row, nullptr, r};
  collective(operation, ~0u, mine, [&](MatrixAccess** lane) {
    int first = self().warp * 32;
    for (int i = 0; i < count; i++) {
      uint16_t m[8][8];
      for (int l = 0; l < 32; l++) hold(m, l, transposed, lane[l]->store[i]);
      for (int k = 0; k < 8; k++) {
        blame_lane(8 * i + k);
        generic_store(lane[8 * i + k]->row, m[k], 16, operation, first + 8 * i + k,
                      Stores::collective);
      }
    }
    blame_running(*self().block);
  });
}

inline uint32_t transpose_matrix(uint32_t bits) {
  uint32_t result = 0;
  MatrixAccess mine{0, &result, &bits};
  collective("movmatrix.trans", ~0u, mine, [](MatrixAccess** lane) {
    uint16_t m[8][8];
    for (int l = 0; l < 32; l++) hold(m, l, false, *lane[l]->store);
    for (int l = 0; l < 32; l++) *lane[l]->load = held_by(m, l, true);
  });
  return result;
}

}  // namespace emulation
