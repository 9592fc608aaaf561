// The pieces of work of a block: decode/plan.cuh says how items are cut into them.
#pragma once

#include "decode/output.cuh"

// Tiles `first` to `last` of an item.
struct Piece {
  int first, last;
};

// Where the piece that begins at `at` ends: where the next piece begins, or where the range or the item ends.
DEVICE int piece_end(const DecodeParams& params, const Position& at, const Position& end, int count) {
  if (params.splits == 0) return at.same_item(end) ? end.tile : count;
  const int pieces = pieces_of(params, count);
  return count == 0 ? 0 : piece_begin(piece_from(at.tile, pieces, count) + 1, pieces, count);
}

// The slot of a piece that is only a part of its item.
DEVICE int slot_of(const DecodeParams& params, const Position& at, int count) {
  if (params.splits == 0) return 2 * int(blockIdx.x) + (at.tile == 0);
  const int item = at.entry * params.attention.heads_kv + at.head;
  return item * params.splits + piece_from(at.tile, pieces_of(params, count), count);
}

// Visits the pieces of this block's range in order: attend(entry, kv_head, piece, slot), with slot -1 if the piece is
// all of its item, or answer_broken(entry, kv_head, packed_end) if the sequence's lengths contradict what the launch
// was prepared for. packed_end: where the rows to be written end.
template <class Attend, class AnswerBroken>
DEVICE void for_each_piece(const DecodeParams& params, Attend attend, AnswerBroken answer_broken) {
  Position at = position(params, blockIdx.x);
  const Position end = position(params, blockIdx.x + 1);
  while (at.before(end)) {
    const Entry entry = entry_of(params, at.entry);
    if (!entry.exists()) {  // nor does any later entry of the sequence
      at = {(entry.sequence + 1) * params.row_tiles, 0, 0};
      continue;
    }
    const int count = entry.tiles.count(), last = piece_end(params, at, end, count);
    if (entry.lengths.broken) {
      const bool last_entry = at.entry % params.row_tiles == params.row_tiles - 1;
      const int64_t all = int64_t(entry.lengths.rows) * heads_a_group(params);
      answer_broken(entry, at.head, last_entry ? all : entry.packed_end);
    } else {
      const bool whole = at.tile == 0 && last == count;
      attend(entry, at.head, Piece{at.tile, last}, whole ? -1 : slot_of(params, at, count));
    }
    if (last == count) at = next_item(params, at);
    else at.tile = last;
  }
}
