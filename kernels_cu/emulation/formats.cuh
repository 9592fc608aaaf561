// Raw bits of tensor-core operands as floats, exactly. Branch-free, so that compilers vectorise the loops over them.
#pragma once

#include "ptx/types.cuh"

namespace emulation {

using ptx::Element;

constexpr int element_bytes(Element e) {
  return e == Element::tf32 ? 4 : e == Element::f16 || e == Element::bf16 ? 2 : 1;
}

inline float float_of(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// f16 is shifted to float's place and scaled to float's bias, which covers subnormals. `special`: the bits if it is an
// infinity or a NaN.
inline float from_f16(uint32_t h) {
  uint32_t magnitude = (h & 0x7FFF) << 13, sign = (h & 0x8000) << 16;
  uint32_t scaled = __float_as_uint(float_of(magnitude) * 0x1p112f);
  uint32_t special = magnitude | 0x7F800000u;
  return float_of(sign | ((h & 0x7C00) == 0x7C00 ? special : scaled));
}
inline float from_bf16(uint32_t h) { return float_of(h << 16); }
inline float from_e5m2(uint32_t b) { return from_f16(b << 8); }
inline float from_e4m3(uint32_t b) {
  uint32_t magnitude = (b & 0x7F) << 20, sign = (b & 0x80) << 24;
  uint32_t scaled = __float_as_uint(float_of(magnitude) * 0x1p120f);
  return float_of(sign | ((b & 0x7F) == 0x7F ? 0x7FC00000u : scaled));
}
inline float from_tf32(uint32_t bits) { return float_of(bits & 0xFFFFE000u); }

// Rounded to nearest even; any NaN becomes the one without a sign. What e4m3 cannot hold becomes its largest.
inline uint16_t to_f16(float value) {
  if (value != value) return 0x7FFF;
  uint32_t bits = __float_as_uint(value), sign = bits >> 16 & 0x8000;
  float magnitude = fabsf(value);
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7C00);
  if (magnitude < 0x1p-14f) return static_cast<uint16_t>(sign | static_cast<uint32_t>(rintf(magnitude * 0x1p24f)));
  bits &= 0x7FFFFFFF;
  return static_cast<uint16_t>(sign | ((bits + 0xFFF + (bits >> 13 & 1) - 0x38000000u) >> 13));
}
inline uint16_t to_bf16(float value) {
  if (value != value) return 0x7FFF;
  uint32_t bits = __float_as_uint(value);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline uint8_t to_e4m3(float value) {
  if (value != value) return 0x7F;
  uint32_t bits = __float_as_uint(value), sign = bits >> 24 & 0x80;
  float magnitude = fabsf(value);
  if (magnitude >= 448.0f) return static_cast<uint8_t>(sign | 0x7E);
  if (magnitude < 0x1p-6f) return static_cast<uint8_t>(sign | static_cast<uint32_t>(rintf(magnitude * 0x1p9f)));
  bits &= 0x7FFFFFFF;
  return static_cast<uint8_t>(sign | ((bits + 0x7FFFF + (bits >> 20 & 1) - 0x3C000000u) >> 20));
}

// Decodes `count` consecutive elements.
inline void decode(Element e, const void* bits, int count, float* out) {
  const uint8_t* bytes = static_cast<const uint8_t*>(bits);
  const uint16_t* halves = static_cast<const uint16_t*>(bits);
  const uint32_t* words = static_cast<const uint32_t*>(bits);
  switch (e) {
    case Element::f16:
      for (int i = 0; i < count; i++) out[i] = from_f16(halves[i]);
      return;
    case Element::bf16:
      for (int i = 0; i < count; i++) out[i] = from_bf16(halves[i]);
      return;
    case Element::e4m3:
      for (int i = 0; i < count; i++) out[i] = from_e4m3(bytes[i]);
      return;
    case Element::e5m2:
      for (int i = 0; i < count; i++) out[i] = from_e5m2(bytes[i]);
      return;
    case Element::tf32:
      for (int i = 0; i < count; i++) out[i] = from_tf32(words[i]);
      return;
  }
}

// The A fragment that mma and wgmma share, for elements of every size: word w of lane l is word l % 4 + 4 (w / 2) of
// the 8 words of row l / 4 + 8 (w % 2).
inline void place_a_fragment(const uint32_t* word, int l, uint32_t* rows) {
  for (int w = 0; w < 4; w++) rows[(l / 4 + 8 * (w % 2)) * 8 + l % 4 + 4 * (w / 2)] = word[w];
}

}  // namespace emulation
