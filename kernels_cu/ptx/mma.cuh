// mma.sync (sm_80; fp8 sm_89): d += a b for a warp, a 16 x k, b k x 8, accumulated in fp32. With g = lane / 4 and
// t = lane % 4, the words hold, from these (row, column) on:
//
//   16-bit, k = 16   a[0] (g, 2t)   a[1] (g + 8, 2t)   a[2] (g, 2t + 8)    a[3] (g + 8, 2t + 8)    two elements each
//                    b0 (2t, g)     b1 (2t + 8, g)
//   fp8, k = 32      a[0] (g, 4t)   a[1] (g + 8, 4t)   a[2] (g, 4t + 16)   a[3] (g + 8, 4t + 16)   four elements each
//                    b0 (4t, g)     b1 (4t + 16, g)
//   tf32, k = 8      a[0] (g, t)    a[1] (g + 8, t)    a[2] (g, t + 4)     a[3] (g + 8, t + 4)     one float each
//                    b0 (t, g)      b1 (t + 4, g)
//   d                d[0], d[1] (g, 2t ..)             d[2], d[3] (g + 8, 2t ..)
//
// Packed to 16 bits, d is the A operand of the next mma.
#pragma once

#include "ptx/types.cuh"

namespace ptx {

#define PTX_MMA(shape)                                                                                      \
  asm volatile("mma.sync.aligned." shape " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// E: Element::f16 or Element::bf16, of a and b
template <Element E>
WRAPPER void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(E == Element::f16 || E == Element::bf16, "16-bit elements");
  if constexpr (E == Element::f16) PTX_MMA("m16n8k16.row.col.f32.f16.f16.f32");
  else PTX_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
}

WRAPPER void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  PTX_MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
}

// E: Element::e4m3 or Element::e5m2. sm_89.
template <Element E>
WRAPPER void mma_m16n8k32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  static_assert(E == Element::e4m3 || E == Element::e5m2, "8-bit elements");
  if constexpr (E == Element::e4m3) PTX_MMA("m16n8k32.row.col.f32.e4m3.e4m3.f32");
  else PTX_MMA("m16n8k32.row.col.f32.e5m2.e5m2.f32");
}

#undef PTX_MMA

}  // namespace ptx
