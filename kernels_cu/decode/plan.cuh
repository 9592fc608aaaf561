// How the work of a decode launch is split into ranges of equal length, one a block.
//
//   entry   a tile of BLOCK_M packed rows of one sequence, numbered sequence * row_tiles + tile
//   item    an entry and a KV head: these rows against all the keys that they see
//   unit    a tile of BLOCK_N keys of an item; an item counts `item_units` more, for what beginning it costs
//
//   units   |.0 1 2 3 4 5 6.|.0 1.|.0 1.|.0 1 2 3 4 5 6 7 8 9 10 11 12 13|
//   items   |   item 0      | 1   | 2   |    item 3                      |
//   ranges  |--- 0 ---|----- 1 -----|----- 2 -----|----- 3 ------|-- 4 --|
//
// A range may begin and end inside an item. Each piece of an item that does not hold all of it goes to a slot of its
// own, and decode/decode_combine.cu merges them. With `splits` pinned, an item is cut into that many pieces of equal
// length, whatever the batch around it, and a piece belongs to the range in which it begins.
//
// gpu_actors/kernels/decode_schedule.py computes the same positions on the host.
#pragma once

#include "decode/params.cuh"
#include "common/mask.cuh"

DEVICE int heads_a_group(const DecodeParams& params) {
  return params.attention.heads_q / params.attention.heads_kv;
}

// One sequence's lengths. `broken`: they contradict what the launch was prepared for, so nothing is read.
struct Sequence {
  int64_t q_start;
  int rows, keys;
  bool broken;
};

DEVICE Sequence sequence_of(const DecodeParams& params, int index) {
  Sequence sequence{0, params.attention.seqlen_q, params.seq_lens[index], false};
  if constexpr (VARLEN) {
    sequence.q_start = params.attention.cu_seqlens_q[index];
    sequence.rows = int(params.attention.cu_seqlens_q[index + 1] - sequence.q_start);
  }
  const int capacity = OWN_LAYOUTS ? int(params.cache_layouts[index].capacity) : params.capacity;
  sequence.broken = sequence.keys < 0 || sequence.keys > capacity || sequence.rows > params.attention.seqlen_q;
  if constexpr (BATCH_IDX) {
    const int place = params.cache_batch_idx[index];
    sequence.broken |= place < 0 || place >= params.cache_sequences;
  }
  if constexpr (LEFTPAD) {
    const int padding = params.cache_leftpad[index];
    sequence.broken |= padding < 0 || padding > sequence.keys;
    if (!sequence.broken) sequence.keys -= padding;
  }
  if constexpr (POINTERS) {
    // cp.async takes addresses that are multiples of 16 bytes, and loads of an element those of its size.
    if (sequence.keys > 0) sequence.broken |= (params.k_ptrs[index] | params.v_ptrs[index]) % CACHE_ALIGNMENT != 0;
  }
  if (sequence.broken) sequence.keys = 0;
  return sequence;
}

// A tile of packed rows. Packed row p is query row p / ratio of the KV head's query head p % ratio, so that
// neighbours have nearly the same mask.
struct Entry {
  Sequence lengths;
  int sequence;
  int packed_begin, packed_end;
  int row_begin, row_end;  // the query rows among them
  Mask mask;
  KeyTiles tiles;

  __device__ __forceinline__ bool exists() const { return packed_begin < packed_end; }
  // The key of the first new row.
  __device__ __forceinline__ int first_new() const {
    return POSITIONS ? lengths.keys - lengths.rows : mask.diagonal;
  }
};

DEVICE Entry entry_of(const DecodeParams& params, int index) {
  Entry entry;
  const int ratio = heads_a_group(params);
  entry.sequence = index / params.row_tiles;
  entry.lengths = sequence_of(params, entry.sequence);
  entry.packed_begin = index % params.row_tiles * BLOCK_M;
  const int rows = at_most(entry.lengths.rows, params.attention.seqlen_q);
  entry.packed_end = at_most(rows * ratio, entry.packed_begin + BLOCK_M);
  entry.row_begin = entry.packed_begin / ratio;
  entry.row_end = (entry.packed_end + ratio - 1) / ratio;
  entry.mask = make_mask(params.attention, entry.lengths.rows, entry.lengths.keys, entry.sequence);
#if POSITIONS
  if (params.attention.q_positions == nullptr) {
    const Steps& keys = entry.mask.positions.keys;
    entry.mask.positions.rows = {keys.at(entry.first_new()), keys.step};
  }
#endif
  entry.tiles = entry.mask.tiles<BLOCK_N>(entry.row_begin, entry.row_end);
  return entry;
}

// Units of one item of the entry.
DEVICE int units_of(const DecodeParams& params, const Entry& entry) {
  return entry.exists() ? entry.tiles.count() + params.item_units : 0;
}

// Pieces of equal length that an item of `count` tiles is cut into, and where they begin.
DEVICE int pieces_of(const DecodeParams& params, int count) { return at_least(1, at_most(params.splits, count)); }
DEVICE int piece_begin(int piece, int pieces, int count) { return int(int64_t(piece) * count / pieces); }
// The first piece that does not begin before the tile.
DEVICE int piece_from(int tile, int pieces, int count) {
  return count == 0 ? 0 : int((int64_t(tile) * pieces + count - 1) / count);
}

// A place in the work: the tile-th tile of an item.
struct Position {
  int entry, head, tile;

  __device__ __forceinline__ bool same_item(const Position& other) const {
    return entry == other.entry && head == other.head;
  }
  __device__ __forceinline__ bool before(const Position& other) const {
    if (entry != other.entry) return entry < other.entry;
    return head != other.head ? head < other.head : tile < other.tile;
  }
};

DEVICE Position next_item(const DecodeParams& params, const Position& at) {
  if (at.head + 1 < params.attention.heads_kv) return {at.entry, at.head + 1, 0};
  return {at.entry + 1, 0, 0};
}

// Where range `index` begins.
DEVICE Position position(const DecodeParams& params, int index) {
  const int32_t* const words = params.plan + 4 * index;
  return {words[0], words[1], words[2]};
}
