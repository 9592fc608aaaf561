// V for products of 8-bit elements: transposed, so that the keys of a column lie together, in tiles and in an order.
//
//     v  (keys, heads, dim)      ->      transposed  (heads, dim, positions)
//
// A sequence starts a tile of its own, so that what lies behind its last key, up to the end of a tile, is zeros and not
// the next sequence. In 16 positions the 16 keys are in the order in which a thread has their scores: products leave it
// two of every eight, and take four that follow each other (t is the thread of its quad):
//
//     scores, keys   0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12 13 | 14 15        positions    0..3     4..7      ..
//                    t=0   t=1   t=2   t=3   t=0    t=1     t=2     t=3         keys       0 1 8 9  2 3 10 11  ..
//                                                                                            t=0      t=1
#pragma once

#include "ptx/types.cuh"

// Where a packed sequence's first value is: behind `start` keys of the sequences before it, each of which leaves at
// most TILE - 1 positions empty.
template <int TILE>
DEVICE int values_start(int start, int sequence) {
  return (start + sequence * (TILE - 1)) / TILE * TILE;
}

// The position of a key of a tile.
DEVICE int position_of_key(int key) { return (key & ~15) | (key & 6) << 1 | (key & 8) >> 2 | (key & 1); }
