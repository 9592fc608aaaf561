// Dropout of scores that lie with keys down and queries across, as backward has them.
//
//   accumulator e of block b    query 2t + e % 2 of the block, key g + 8 * (e / 2) of 16     (g = lane / 4, t = lane % 4)
//
// Philox draws for four neighbouring keys of a query at a time, which four lanes with the same t hold. Each of the four
// draws for one e and passes the words on, so that no draw is made twice.
#pragma once

#include "common/philox.cuh"

// Bit 4 * block + e is set if that probability is kept. first_row: of the first block, first_key: of the 16. thread: in
// the block.
template <int BLOCKS>
DEVICE uint32_t kept_probabilities(const Dropout& dropout, int first_row, int first_key, int thread = int(threadIdx.x)) {
  static_assert(BLOCKS <= 8, "four bits a block");
#if POSITIONS
  // Neighbouring keys need not share a draw, so each takes its own. Rolled, to keep the code small.
  const int lane = thread % 32;
  uint32_t kept = 0;
#pragma unroll 1
  for (int i = 0; i < 4 * BLOCKS; i++) {
    const int row = first_row + i / 4 * 8 + lane % 4 * 2 + i % 2, key = first_key + lane / 4 + i % 4 / 2 * 8;
    kept |= uint32_t(dropout.keeps(row, key)) << i;
  }
#else
  const int lane = thread % 32, mine = lane / 4 % 4;
  const int group = (first_key + mine / 2 * 8 + lane / 16 * 4) / 4;
  uint32_t kept = 0;
#pragma unroll
  for (int block = 0; block < BLOCKS; block++) {
    const int row = first_row + 8 * block + lane % 4 * 2 + mine % 2;
    PhiloxWords drawn_words = dropout.draws(row, group);
    uint32_t(&word)[4] = drawn_words.word;
    // After this, word[i] is what the lane at distance i needs; selects keep the words in registers.
    const auto exchange = [&](bool swap, int a, int b) {
      const uint32_t low = swap ? word[b] : word[a], high = swap ? word[a] : word[b];
      word[a] = low;
      word[b] = high;
    };
    exchange(mine & 1, 0, 1);
    exchange(mine & 1, 2, 3);
    exchange(mine & 2, 0, 2);
    exchange(mine & 2, 1, 3);
#pragma unroll
    for (int distance = 0; distance < 4; distance++) {
      const uint32_t drawn = distance == 0 ? word[0] : __shfl_xor_sync(0xffffffffu, word[distance], 4 * distance);
      if (drawn >= dropout.threshold) kept |= 1u << (4 * block + (mine ^ distance));
    }
  }
#endif
  return kept;
}
