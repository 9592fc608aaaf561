// Which head and tile a block has if a mask gives tiles unequal work: those with the most work, of all heads of a
// section, start first. The last blocks to start are then short, and no multiprocessor is left alone with a long one.
//
//     numbers in order   section 0                                  section 1
//                        rank 0:  head 0, head 1 .. head H - 1      rank 0:  head H, ..
//                        rank 1:  head 0, head 1 .. head H - 1      ..
//                        ..
//
// Ranks are a head's tiles by falling work. A section has as many heads as have SECTION_BLOCKS tiles, in whole groups
// that share keys and values: blocks that run together read few heads, and L2 holds what they share. The last section
// also takes the heads that are left over, because a section of few heads would end with long blocks.
//
// If all tiles have the same work, blocks are numbered by head, then tile.
#pragma once

#include "common/mask.cuh"
#include "common/score_mod.cuh"

constexpr bool UNEVEN = CAUSAL || WINDOW || BLOCK_MASK;
constexpr int SECTION_BLOCKS = 512;  // about four for each multiprocessor of the largest GPUs

struct HeadRank {
  int sequence_head;  // heads of all sequences, one sequence after the other
  int rank;
};

// ranks: tiles of a head. group: heads that share keys and values.
DEVICE HeadRank rank_block(int number, int ranks, int group) {
  if constexpr (!UNEVEN) return {number / ranks, number % ranks};
  const int heads = int(gridDim.x) / ranks, needed = (SECTION_BLOCKS + ranks - 1) / ranks;
  const int section = at_most(heads, (needed + group - 1) / group * group), last = heads / section - 1;
  const int index = at_most(last, number / (section * ranks)), first = index * section;
  const int within = number - first * ranks, size = index == last ? heads - first : section;
  return {first + within % size, within / size};
}
