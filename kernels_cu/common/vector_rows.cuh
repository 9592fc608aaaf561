// Elements of a row between global memory and registers, 16 bytes at a time: as many elements as 16 bytes of the
// narrower of two types hold. With fewer or unaligned elements the caller takes one at a time.
#pragma once

#include "ptx/memory.cuh"
#include "common/types.cuh"

template <class A, class B>
struct Same {
  static constexpr bool value = false;
};
template <class A>
struct Same<A, A> {
  static constexpr bool value = true;
};

template <class Element>
constexpr bool IS_FP8 = Same<Element, e4m3_t>::value || Same<Element, e5m2_t>::value;

template <class From, class To>
constexpr int vector_length() {
  return 16 / int(sizeof(From) < sizeof(To) ? sizeof(From) : sizeof(To));
}

DEVICE bool is_aligned(const void* pointer) { return reinterpret_cast<uint64_t>(pointer) % 16 == 0; }

// Element i of packed words, and a word's bits from an element.
template <class Element>
DEVICE Element unpack(const uint32_t* words, int i) {
  if constexpr (sizeof(Element) == 4) return ptx::as_float(words[i]);
  else if constexpr (sizeof(Element) == 2) return {uint16_t(words[i / 2] >> (i % 2 * 16) & 0xffff)};
  else return {uint8_t(words[i / 4] >> (i % 4 * 8) & 0xff)};
}
template <class Element>
DEVICE uint32_t packed(Element x, int i) {
  if constexpr (sizeof(Element) == 4) return ptx::as_bits(x);
  else if constexpr (sizeof(Element) == 2) return uint32_t(x.bits) << (i % 2 * 16);
  else return uint32_t(x.bits) << (i % 4 * 8);
}

// Loads N elements: 16 bytes at a time if N elements are whole vectors, which must be aligned, else one by one.
template <class Element, int N>
DEVICE void load_elements(float (&x)[N], const Element* from) {
  constexpr int PER_VECTOR = 16 / sizeof(Element);
  if constexpr (N % PER_VECTOR == 0) {
#pragma unroll
    for (int v = 0; v < N / PER_VECTOR; v++) {
      uint32_t words[4];
      ptx::load_global_v4(words, from + v * PER_VECTOR);
#pragma unroll
      for (int i = 0; i < PER_VECTOR; i++) x[v * PER_VECTOR + i] = to_real(unpack<Element>(words, i));
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = to_real(from[i]);
  }
}

// Rounded to nearest even; fp8 is scaled first, and saturates.
template <class Element>
DEVICE Element rounded(float x, float scale) {
  return from_real(Rounded<Element>(), IS_FP8<Element> ? x * scale : x);
}

template <class Element, int N>
DEVICE void store_elements(Element* to, const float (&x)[N], float scale) {
  constexpr int PER_VECTOR = 16 / sizeof(Element);
  if constexpr (N % PER_VECTOR == 0) {
#pragma unroll
    for (int v = 0; v < N / PER_VECTOR; v++) {
      uint32_t words[4] = {};
#pragma unroll
      for (int i = 0; i < PER_VECTOR; i++) {
        words[i * sizeof(Element) / 4] |= packed(rounded<Element>(x[v * PER_VECTOR + i], scale), i);
      }
      ptx::store_global_v4(to + v * PER_VECTOR, words);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; i++) to[i] = rounded<Element>(x[i], scale);
  }
}

// From memory to memory. Equal types keep their bits, those of a NaN included.
template <int N, class From, class To>
DEVICE void move_elements(const From* from, To* to, float scale) {
  if constexpr (!Same<From, To>::value) {
    float x[N];
    load_elements(x, from);
    store_elements(to, x, scale);
  } else if constexpr (N * sizeof(From) == 16) {
    uint32_t words[4];
    ptx::load_global_v4(words, from);
    ptx::store_global_v4(to, words);
  } else {
    for (int i = 0; i < N; i++) to[i] = from[i];
  }
}
