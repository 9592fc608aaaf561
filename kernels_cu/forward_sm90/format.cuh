// Element types as the kernels of sm_90a multiply and pack them.
#pragma once

#include "common/params.cuh"
#include "ptx.cuh"

// Of an element: its name in products, and how floats are packed to it.
template <class Element>
struct FormatOf;
template <>
struct FormatOf<half_t> {
  static constexpr ptx::Element ELEMENT_OF = ptx::Element::f16;
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return ptx::pack_half(low, high); }
};
template <>
struct FormatOf<bfloat16_t> {
  static constexpr ptx::Element ELEMENT_OF = ptx::Element::bf16;
  static __device__ __forceinline__ uint32_t pack(float low, float high) { return ptx::pack_bfloat16(low, high); }
};
template <>
struct FormatOf<e4m3_t> {
  static constexpr ptx::Element ELEMENT_OF = ptx::Element::e4m3;
  static __device__ __forceinline__ uint32_t pack(float a, float b, float c, float d) {
    return ptx::pack_e4m3(a, b, c, d);
  }
};
// Weights are e4m3 too, because tensor cores multiply e4m3 with e5m2: the third fraction bit costs nothing.
template <>
struct FormatOf<e5m2_t> : FormatOf<e4m3_t> {
  static constexpr ptx::Element ELEMENT_OF = ptx::Element::e5m2;
};
constexpr ptx::Element OPERAND = FormatOf<ELEMENT>::ELEMENT_OF;
constexpr ptx::Element WEIGHT = OPERAND == ptx::Element::e5m2 ? ptx::Element::e4m3 : OPERAND;
