// The numbers of forward_sm90's own code for its boxes: descriptors, their steps and the places of 16-byte units.
// Macro BOXES_CASES: CASE(number, rows, columns, element) each. Macros of forward_sm90/layout.cuh: any variant's.
#include "forward_sm90/layout.cuh"

struct BoxNumbers {
  uint32_t width, count, line, box_bytes;
  unsigned long long rows, columns;
  uint32_t column_steps[16], row_steps[16];
};

template <class B, int ROWS_OF_BOX>
DEVICE void describe(uint32_t base, BoxNumbers* numbers, uint32_t* places) {
  *numbers = {uint32_t(B::WIDTH), uint32_t(B::COUNT), B::LINE, B::BOX_BYTES, B::rows(base), B::columns(base), {}, {}};
  for (int n = 0; n < 16; n++) {
    numbers->column_steps[n] = B::column_step(n);
    numbers->row_steps[n] = B::row_step(n);
  }
  constexpr int UNITS = B::COUNT * B::WIDTH / B::UNIT;
  for (int i = 0; i < ROWS_OF_BOX * UNITS; i++) places[i] = B::place(base, i / UNITS, i % UNITS);
}

extern "C" __global__ void boxes(uint32_t base, int number, BoxNumbers* numbers, uint32_t* places) {
#define CASE(number_, rows, columns, element) \
  if (number == number_) describe<Boxes<rows, columns, element>, rows>(base, numbers, places);
  BOXES_CASES
#undef CASE
}
