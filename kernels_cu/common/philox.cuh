// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, SC'11) and the dropout that it decides.
//
//   key      the seed's low and high 32 bits
//   counter  (key index / 4, row, sequence * heads_q + head, 0)
//   lane     key index % 4
//
// With POSITIONS row, key and head are those of the larger problem.
//
// A draw depends on nothing else, so any tiling, order or pass over the scores drops the same probabilities.
#pragma once

#include "common/positions.cuh"

struct PhiloxWords {
  uint32_t word[4];
};

DEVICE PhiloxWords philox4x32(PhiloxWords counter, uint32_t key_low, uint32_t key_high) {
  uint32_t(&c)[4] = counter.word;
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint64_t even = uint64_t(0xD2511F53u) * c[0], odd = uint64_t(0xCD9E8D57u) * c[2];
    c[0] = uint32_t(odd >> 32) ^ c[1] ^ key_low;
    c[1] = uint32_t(odd);
    c[2] = uint32_t(even >> 32) ^ c[3] ^ key_high;
    c[3] = uint32_t(even);
    key_low += 0x9E3779B9u;
    key_high += 0xBB67AE85u;
  }
  return counter;
}

struct Dropout {
  uint64_t seed;
  uint32_t threshold;      // draws below it are dropped
  uint32_t sequence_head;  // sequence * heads_q + head
#if POSITIONS
  Positions positions;
#endif

  // The draws of keys 4 * group .. 4 * group + 3.
  __device__ __forceinline__ PhiloxWords draws(int row, int group) const {
    const PhiloxWords counter{{uint32_t(group), uint32_t(row), sequence_head, 0}};
    return philox4x32(counter, uint32_t(seed), uint32_t(seed >> 32));
  }

  __device__ __forceinline__ bool keeps(int row, int key) const {
#if POSITIONS
    row = positions.row(row);
    key = positions.key(key);
#endif
    const PhiloxWords words = draws(row, key / 4);
    // Selects rather than an index, which would put the words into local memory.
    const uint32_t low = key & 1 ? words.word[1] : words.word[0];
    const uint32_t high = key & 1 ? words.word[3] : words.word[2];
    return (key & 2 ? high : low) >= threshold;
  }
};

DEVICE Dropout make_dropout(const Params& params, int sequence, int head) {
#if POSITIONS
  const uint32_t sequence_head = sequence * params.dropout_heads + params.dropout_first_head + head;
  return {params.dropout_seed, params.dropout_threshold, sequence_head, positions_of(params, sequence)};
#else
  const uint32_t sequence_head = sequence * params.heads_q + head;
  return {params.dropout_seed, params.dropout_threshold, sequence_head};
#endif
}
