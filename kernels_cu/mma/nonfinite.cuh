// Infinities and NaN among the values of a tile that not all rows see whole.
//
// A row's weight of a key that it does not see is 0, and 0 * NaN is NaN: the product O = P V would spread such a value
// to rows that do not see it. So if a tile with a mask has one, the product leaves it out, and it is added separately
// to the rows that see its key. Values that no row of the block sees are not even read.
#pragma once

#include "mma/tile.cuh"

// The bits of those elements of a word whose exponent is all ones.
template <uint32_t EXPONENT>
DEVICE uint32_t nonfinite_halves(uint32_t word) {
  const uint32_t low = (word & EXPONENT) == EXPONENT ? 0xffffu : 0, high = word >> 16;
  return low | ((high & EXPONENT) == EXPONENT ? 0xffff0000u : 0);
}
DEVICE uint32_t nonfinite_bits(half_t, uint32_t word) { return nonfinite_halves<0x7c00>(word); }
DEVICE uint32_t nonfinite_bits(bfloat16_t, uint32_t word) { return nonfinite_halves<0x7f80>(word); }
// Of 8-bit floats: adding the rest to a byte's magnitude carries into the place of its sign.
template <uint32_t REST>
DEVICE uint32_t nonfinite_bytes(uint32_t word) {
  return (((word & 0x7f7f7f7fu) + REST) >> 7 & 0x01010101u) * 0xffu;
}
DEVICE uint32_t nonfinite_bits(e4m3_t, uint32_t word) { return nonfinite_bytes<0x01010101u>(word); }
DEVICE uint32_t nonfinite_bits(e5m2_t, uint32_t word) { return nonfinite_bytes<0x04040404u>(word); }
DEVICE uint32_t nonfinite_bits(float, uint32_t word) { return (word & 0x7f800000u) == 0x7f800000u ? ~0u : 0; }

// Sets those that this thread copied to 0. True if there were any.
template <class Element, int THREADS, class Tile>
DEVICE bool clear_nonfinite(const Tile& tile) {
  using Mine = Share<Tile, THREADS>;
  const LaneAddress at = tile.lane(Mine::row(), Mine::chunk());
  bool found = false;
  Mine::template for_each<2>([&](int rows, int chunks) {
    const uint32_t address = at.at<Tile>(rows, chunks);
    uint32_t words[4], all = 0;
    ptx::load_shared_v4(words, address);
#pragma unroll
    for (int w = 0; w < 4; w++) {
      const uint32_t nonfinite = nonfinite_bits(Element(), words[w]);
      words[w] &= ~nonfinite;
      all |= nonfinite;
    }
    if (all != 0) ptx::store_shared_v4(address, words);
    found |= all != 0;
  });
  return found;
}
