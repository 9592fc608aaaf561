// mma.sync. Products are exact in fp32 and summed in order of k, or cut off as tensor cores do (truncated_sum.cuh).
#pragma once

#include "emulation/approximation.cuh"
#include "emulation/collective.cuh"
#include "emulation/truncated_sum.cuh"

namespace emulation {

struct MmaOperands {
  float* d;
  const uint32_t* a;
  uint32_t b[2];
};

inline float* element_of(MmaOperands** lane, int row, int column) {
  return &lane[row % 8 * 4 + column / 2]->d[row / 8 * 2 + column % 2];
}

// a: 16 x k, b: k x 8. The products of 16 bytes of k are one sum.
inline void multiply_cut_off(Element e, const float* a, const float* b, int k, MmaOperands** lane) {
  int a_exponents[16 * 32], b_exponents[32 * 8];
  exponents_of(e, a, 16 * k, a_exponents);
  exponents_of(e, b, k * 8, b_exponents);
  const Factors rows{a, a_exponents}, columns{b, b_exponents};
  const int step = 16 / element_bytes(e);
  for (int i = 0; i < 16; i++) {
    float d[8];
    for (int j = 0; j < 8; j++) d[j] = *element_of(lane, i, j);
    for (int x = 0; x < k; x += step)
      if (element_bytes(e) == 1) add_truncated<8>(rows.from(i * k + x), columns.from(x * 8), 8, step, d);
      else add_cut_off<8>(rows.from(i * k + x), columns.from(x * 8), 8, step, 24, d);
    for (int j = 0; j < 8; j++) *element_of(lane, i, j) = d[j];
  }
}

inline void multiply_fragments(Element e, MmaOperands** lane) {
  const int k = 32 / element_bytes(e);
  uint32_t a_words[16 * 8], b_words[8 * 8];
  for (int l = 0; l < 32; l++) {
    place_a_fragment(lane[l]->a, l, a_words);
    for (int w = 0; w < 2; w++) b_words[l / 4 * 8 + l % 4 + 4 * w] = lane[l]->b[w];
  }
  float a[16 * 32], b_columns[8 * 32], b[32 * 8], sum[16 * 8] = {};
  decode(e, a_words, 16 * k, a);
  decode(e, b_words, 8 * k, b_columns);
  for (int j = 0; j < 8; j++)
    for (int x = 0; x < k; x++) b[x * 8 + j] = b_columns[j * k + x];
  if (like_hardware()) return multiply_cut_off(e, a, b, k, lane);
  for (int i = 0; i < 16; i++)
    for (int x = 0; x < k; x++)
      for (int j = 0; j < 8; j++) sum[8 * i + j] += a[i * k + x] * b[x * 8 + j];
  for (int l = 0; l < 32; l++)
    for (int r = 0; r < 4; r++) lane[l]->d[r] += sum[(l / 4 + 8 * (r / 2)) * 8 + 2 * (l % 4) + r % 2];
}

__attribute__((noinline)) inline void mma(const char* operation, Element e, float* d, const uint32_t* a, uint32_t b0,
                                          uint32_t b1) {
  MmaOperands mine{d, a, {b0, b1}};
  collective(operation, ~0u, mine, [e](MmaOperands** lane) { multiply_fragments(e, lane); });
}

}  // namespace emulation
