// What the lanes of a warp hold of the matrices that mma.sync multiplies, and how it gets there from shared memory.
//
//   g = lane / 4, t = lane % 4            16-bit inputs, m16n8k16         float inputs, m16n8k8 tf32
//   S = Q K^T   a step of the sum           16 columns (two chunks)         8 columns (two chunks)
//               lane holds of Q             rows g, g + 8; columns 2t, 2t + 1 of both chunks | column t of both
//   O = P V     a step of the sum           16 keys                         8 keys
//               lane holds of P             keys 2t, 2t + 1 of two blocks of 8 | of one
//
// S leaves the first product as d: rows g and g + 8, keys 2t and 2t + 1 of every block of 8 keys. Packed, that is the
// A operand of the second product, so P never leaves registers. For tf32 the operand wants keys t and t + 4 instead: a
// sum may be taken in any order, so there V's rows are renamed to fit, b0 being key 2t and b1 key 2t + 1.
#pragma once

#include "mma/accumulator.cuh"
#include "mma/tile.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/pack.cuh"

// Where a lane's row of ldmatrix lies for the A operand: 16 rows from first_row on, two chunks.
template <class Tile>
DEVICE LaneAddress lane_of_a(const Tile& tile, int first_row) {
  return tile.lane(first_row + lane_id() % 16, lane_id() / 16);
}

// The same for two B operands at once whose columns are the tile's rows: 16 rows, two chunks. first_row: a multiple of
// 16, as for A.
template <class Tile>
DEVICE LaneAddress lane_of_b(const Tile& tile, int first_row = 0) {
  return tile.lane(first_row + lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2);
}

template <ptx::Element E>
struct HalfProducts {
  static constexpr int KEYS = 16;  // a step of O = P V

  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k16<E>(d, a, b0, b1);
  }

  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    return E == ptx::Element::f16 ? ptx::pack_half(low, high) : ptx::pack_bfloat16(low, high);
  }

  // The A operand of step `step` out of the weights of all key blocks.
  template <int BLOCKS>
  static __device__ __forceinline__ void weights(uint32_t (&a)[4], const float (&p)[BLOCKS][4], int step) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float(&block)[4] = p[2 * step + i / 2];
      a[i] = pack(block[i % 2 * 2], block[i % 2 * 2 + 1]);
    }
  }

  template <class Tile>
  static __device__ __forceinline__ LaneAddress lane_of_values(const Tile& tile, int first_row = 0) {
    return tile.lane(first_row + lane_id() % 16, lane_id() / 16);
  }

  // The B operands of one step and of one or two blocks of 8 columns from column 16 * pair on.
  template <class Tile>
  static __device__ __forceinline__ void values(uint32_t (&b)[4], const LaneAddress& lane, int step, int pair, int) {
    ptx::ldmatrix_x4_trans(b, lane.template at<Tile>(step * KEYS, 2 * pair));
  }
};

// BITS: significant bits that the operands are rounded to, 11 of tf32 or 8 of bf16. f16 has tf32's 11, too; tf32 keeps
// float's range besides, so that large inputs of compute="f16" do not become infinite.
template <int BITS>
struct FloatProducts {
  static constexpr int KEYS = 8;

  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k8_tf32(d, a, b0, b1);
  }

  template <int BLOCKS>
  static __device__ __forceinline__ void weights(uint32_t (&a)[4], const float (&p)[BLOCKS][4], int step) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = round(p[step][i % 2 * 2 + i / 2]);
  }

  static __device__ __forceinline__ uint32_t round(float x) { return ptx::as_bits(round_operand<BITS>(x)); }

  // ldmatrix transposes 16-bit elements only, so a lane loads its four words of V one by one.
  template <class Tile>
  static __device__ __forceinline__ LaneAddress lane_of_values(const Tile& tile) {
    return tile.lane(lane_id() % 4 * 2, lane_id() / 16);
  }

  template <class Tile>
  static __device__ __forceinline__ void values(uint32_t (&b)[4], const LaneAddress& lane, int step, int pair,
                                                int blocks) {
    const uint32_t word = lane_id() / 4 % 4 * 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i / 2 >= blocks) break;
      // Row 2t + 1 is spread like row 2t, or by one place more.
      const LaneAddress row{lane.row + i % 2 * Tile::PITCH, lane.spread ^ (i % 2 * (Tile::FACTOR == 8 ? 16 : 0))};
      b[i] = ptx::load_shared(row.template at<Tile>(step * KEYS, 4 * pair + i / 2 * 2) + word);
    }
  }
};

template <class Element>
struct ProductsOf;
template <>
struct ProductsOf<half_t> : HalfProducts<ptx::Element::f16> {};
template <>
struct ProductsOf<bfloat16_t> : HalfProducts<ptx::Element::bf16> {};
template <>
struct ProductsOf<float> : FloatProducts<COMPUTE_BITS> {};
using Products = ProductsOf<ELEMENT>;
