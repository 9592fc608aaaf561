// The positions of rows and keys in a larger problem, of which a launch has a part (POSITIONS).
//
//   row i of a sequence     position  rows.first + i * rows.step        key j     keys.first + j * keys.step
//
// Masks, ALiBi and dropout use positions; memory uses indices. Positions stay below 2^30, as lengths do.
#pragma once

#include "common/params.cuh"

struct Steps {
  int first, step;

  // Wraps around in 32 bits: an index past the end may have any position, and is hidden.
  __device__ __forceinline__ int at(int index) const { return int(uint32_t(first) + uint32_t(index) * uint32_t(step)); }
  // How many of `count` are at `position` or before it.
  __device__ __forceinline__ int up_to(int position, int count) const {
    if (position < first) return 0;
    const int found = (position - first) / step + 1;
    return found > count ? count : found;
  }
};

struct Positions {
  Steps rows, keys;

  __device__ __forceinline__ int row(int index) const { return rows.at(index); }
  __device__ __forceinline__ int key(int index) const { return keys.at(index); }
};

DEVICE Steps steps_of(const int32_t* positions, int words, int sequence) {
  if (positions == nullptr) return {0, 1};
  positions += int64_t(sequence) * words;
  return {positions[0], words == 2 ? positions[1] : 1};
}

DEVICE Positions positions_of(const Params& params, int sequence) {
  return {steps_of(params.q_positions, params.q_position_words, sequence),
          steps_of(params.k_positions, params.k_position_words, sequence)};
}
