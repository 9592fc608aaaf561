// Which head and tile a block has where a mask gives tiles unequal work: those with the most work start first, of all heads.
// The last blocks to start are then short ones, and no multiprocessor is left alone with a long one.
//
//     numbers in order   section 0                                  section 1
//                        rank 0:  head 0, head 1 .. head H - 1      rank 0:  head H, ..
//                        rank 1:  head 0, head 1 .. head H - 1      ..
//                        ..
//
// Ranks are a head's tiles by falling work. A section is as many heads as have SECTION_BLOCKS tiles, so that blocks which
// run together read few heads, and L2 holds what they share: whole groups that share keys and values. The last section
// takes what is left over, too: of few heads alone it would end with long blocks.
//
// Where all tiles have the same work, blocks are numbered by head, then tile.
#pragma once

#include "common/mask.cuh"
#include "common/score_mod.cuh"

constexpr bool UNEVEN = CAUSAL || WINDOW || BLOCK_MASK;
constexpr int SECTION_BLOCKS = 512;  // some four for each multiprocessor of the GPUs with the most

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
