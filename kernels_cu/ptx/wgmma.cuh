// wgmma (sm_90a): a warpgroup multiplies 64 x K by K x N from shared memory (or A from registers) into fp32 registers,
// while its threads go on. K is 16 for 16-bit and 32 for 8-bit elements; N is a multiple of 8 up to 256.
//
// Order: write registers -> wgmma_fence -> wgmma_... (any number) -> wgmma_commit -> ... -> wgmma_wait -> read
// registers. Thread t of the warpgroup, with w = t / 32, g = t % 32 / 4 and q = t % 4, holds d[4j + e] = row 16w + g +
// 8 (e / 2), column 8j + 2q + e % 2: packed to 16 bits, d[8i .. 8i + 7] are the A registers of the i-th K step of the
// next product.
#pragma once

#include "ptx/pin.cuh"
#include "ptx/wgmma_sizes.cuh"

// A kernel that multiplies only by multiples of 16 or 32 says so before its first include, and compiles faster.
#ifndef PTX_WGMMA_STEP
#define PTX_WGMMA_STEP 8
#endif

namespace ptx {

// How rows of 16-byte units are permuted in shared memory; the numbers of the descriptor.
enum class Swizzle : uint32_t { none = 0, b128 = 1, b64 = 2, b32 = 3 };

// Describes an operand in shared memory. K-major: consecutive k lie together; MN-major ("transposed"): consecutive rows
// of A or columns of B. With swizzle of W bytes, an atom is 8 lines of W bytes, and the first atom starts at a multiple
// of 8 W:
//   K-major     STRIDE: bytes from 8 rows to the next 8; LEADING is not used (any multiple of 16)
//   MN-major    LEADING: bytes from W / 2 columns to the next W / 2; STRIDE: bytes from 8 k to the next 8
// Without swizzle, 8 x 16-byte core matrices: LEADING along k and STRIDE along m or n, in both orders.
// A step of bytes along K-major rows adds bytes / 16 to the descriptor.
template <Swizzle S, uint32_t LEADING, uint32_t STRIDE>
WRAPPER uint64_t matrix_descriptor(uint32_t shared) {
  static_assert(LEADING % 16 == 0 && STRIDE % 16 == 0 && LEADING < 1u << 18 && STRIDE < 1u << 18,
                "multiples of 16 below 2^18");
  const uint32_t low = (shared & 0x3FFFF) >> 4 | (LEADING >> 4) << 16;
  const uint32_t high = STRIDE >> 4 | static_cast<uint32_t>(S) << 30;
  return static_cast<uint64_t>(high) << 32 | low;
}

// Before the first wgmma, and after every write to registers that a wgmma will read.
WRAPPER void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// The wgmma since the last commit become a group.
WRAPPER void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING of the latest groups are unfinished.
template <int PENDING>
WRAPPER void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Both operands in shared memory: %o0, %o1 their descriptors, %o2 accumulate, %o3, %o4 transposition
#define PTX_WGMMA_SS(n, shape, transposition, o0, o1, o2, ...)                                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n shape \
               " {" PTX_LIST_##n "}, %" #o0 ", %" #o1 ", p, 1, 1" transposition ";\n}"                     \
               : PTX_DATA_##n                                                                              \
               : "l"(a), "l"(b), "r"(accumulate), ##__VA_ARGS__)
// A in registers: %o0 .. %o3, %o4 the descriptor of B, %o5 accumulate, %o6 transposition
#define PTX_WGMMA_RS(n, shape, transposition, o0, o1, o2, o3, o4, o5, ...)                                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n shape             \
               " {" PTX_LIST_##n "}, {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1" transposition ";\n}" \
               : PTX_DATA_##n                                                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), ##__VA_ARGS__)

template <int N>
struct WgmmaSize {};

#define PTX_WGMMA_SIZE(n, o0, o1, o2, o3, o4, o5, o6)                                                               \
  template <Element E, int TRANS_A, int TRANS_B>                                                                    \
  WRAPPER void wgmma_ss_sized(WgmmaSize<n>, float (&d)[n / 2], uint64_t a, uint64_t b, int accumulate) {             \
    if constexpr (E == Element::f16)                                                                                \
      PTX_WGMMA_SS(n, "k16.f32.f16.f16", ", %" #o3 ", %" #o4, o0, o1, o2, "n"(TRANS_A), "n"(TRANS_B));              \
    else if constexpr (E == Element::bf16)                                                                          \
      PTX_WGMMA_SS(n, "k16.f32.bf16.bf16", ", %" #o3 ", %" #o4, o0, o1, o2, "n"(TRANS_A), "n"(TRANS_B));            \
    else if constexpr (E == Element::e4m3) PTX_WGMMA_SS(n, "k32.f32.e4m3.e4m3", "", o0, o1, o2);                    \
    else PTX_WGMMA_SS(n, "k32.f32.e5m2.e5m2", "", o0, o1, o2);                                                      \
  }                                                                                                                 \
  template <Element E, int TRANS_B, Element B>                                                                      \
  WRAPPER void wgmma_rs_sized(WgmmaSize<n>, float (&d)[n / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) { \
    if constexpr (E == Element::f16)                                                                                \
      PTX_WGMMA_RS(n, "k16.f32.f16.f16", ", %" #o6, o0, o1, o2, o3, o4, o5, "n"(TRANS_B));                          \
    else if constexpr (E == Element::bf16)                                                                          \
      PTX_WGMMA_RS(n, "k16.f32.bf16.bf16", ", %" #o6, o0, o1, o2, o3, o4, o5, "n"(TRANS_B));                        \
    else if constexpr (E == Element::e4m3 && B == Element::e5m2)                                                    \
      PTX_WGMMA_RS(n, "k32.f32.e4m3.e5m2", "", o0, o1, o2, o3, o4, o5);                                             \
    else if constexpr (E == Element::e4m3) PTX_WGMMA_RS(n, "k32.f32.e4m3.e4m3", "", o0, o1, o2, o3, o4, o5);        \
    else PTX_WGMMA_RS(n, "k32.f32.e5m2.e5m2", "", o0, o1, o2, o3, o4, o5);                                          \
  }
PTX_WGMMA_SIZES_OF_32(PTX_WGMMA_SIZE)
#if PTX_WGMMA_STEP <= 16
PTX_WGMMA_SIZES_OF_16(PTX_WGMMA_SIZE)
#endif
#if PTX_WGMMA_STEP <= 8
PTX_WGMMA_SIZES_OF_8(PTX_WGMMA_SIZE)
#endif
#undef PTX_WGMMA_SIZE

template <int N, Element E, bool TRANS_A, bool TRANS_B>
WRAPPER constexpr bool wgmma_exists() {
  return N % PTX_WGMMA_STEP == 0 && N >= 8 && N <= 256 && E != Element::tf32 &&
         (E == Element::f16 || E == Element::bf16 || (!TRANS_A && !TRANS_B));
}

// d = a b, plus d if accumulate: a 64 x K, b K x N, both by descriptor. TRANS_A, TRANS_B: that operand is MN-major
// (16-bit elements only).
template <int N, Element E, bool TRANS_A = false, bool TRANS_B = false>
WRAPPER void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(wgmma_exists<N, E, TRANS_A, TRANS_B>(), "no such wgmma");
  wgmma_ss_sized<E, TRANS_A, TRANS_B>(WgmmaSize<N>{}, d, a, b, accumulate);
}

// The same with a in registers, laid out like the A fragment of mma (ptx/mma.cuh) for the warp's 16 rows. B: of b, if
// it is not a's: e5m2 beside e4m3.
template <int N, Element E, bool TRANS_B = false, Element B = E>
WRAPPER void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(wgmma_exists<N, E, false, TRANS_B>(), "no such wgmma");
  static_assert(B == E || (E == Element::e4m3 && B == Element::e5m2), "no such pair of elements here");
  wgmma_rs_sized<E, TRANS_B, B>(WgmmaSize<N>{}, d, a, b, accumulate);
}

}  // namespace ptx
