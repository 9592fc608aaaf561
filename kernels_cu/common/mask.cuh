// Which keys a query row sees, key by key and tile by tile. Rows and keys count from the start of their sequence.
//
//              keys 0 1 2 ..                  the diagonal of row i is key i + diagonal; the row sees
//   row 0      s s . w w d r r . . . .          d  that key itself
//   row 1      s s . . w w d r r . . .          w  `left` keys before it (WINDOW; else all)
//   row 2      s s . . . w w d r r . .          r  `right` keys after it (WINDOW; else all)
//                                               s  the first `sink_tokens` keys (SINK_TOKENS)
//
// CAUSAL hides what lies right of the diagonal, sink tokens included. CHUNKED ends w and r at the edges of the chunk of d,
// keys [n * chunk, (n + 1) * chunk). Bounds are inclusive; unbounded ones are at
// least as large as any sequence. Lengths stay below 2^30, so that no sum here leaves 32 bits.
#pragma once

#include "common/positions.cuh"

struct KeyTiles {  // [0, sinks) and [begin, end), in tiles; begin >= sinks
  int sinks, begin, end;

  __device__ __forceinline__ int count() const { return sinks + end - begin; }
  __device__ __forceinline__ int at(int n) const { return n < sinks ? n : begin + n - sinks; }
  // How many of them come before `tile`, which is one of them.
  __device__ __forceinline__ int before(int tile) const { return tile < sinks ? tile : tile - begin + sinks; }
};

struct SeenRows {  // [begin, end)
  int begin, end;

  __device__ __forceinline__ bool has(int row) const { return row >= begin && row < end; }
};

// Keys that one row sees, counted from some key on: [.., sinks) and [begin, end).
struct SeenColumns {
  int sinks, begin, end;

  __device__ __forceinline__ bool has(int column) const {
    bool seen = column < end && (!WINDOW || column >= begin);
    if (WINDOW && SINK_TOKENS) seen = seen || column < sinks;
    return seen;
  }
};

DEVICE int at_least(int low, int x) { return x < low ? low : x; }
DEVICE int at_most(int high, int x) { return x > high ? high : x; }

// How far a row sees to both sides of its own key: a window, and the edges of the own key's chunk.
struct Reach {
  int left, right, chunk;

  __device__ __forceinline__ int chunk_begin(int own) const {
    const int past = own % chunk;
    return own - (past < 0 ? past + chunk : past);
  }
  // The first key, if it and the own key are counted from `origin`.
  __device__ __forceinline__ int first(int own, int origin = 0) const {
    return CHUNKED ? at_least(chunk_begin(own + origin) - origin, own - left) : own - left;
  }
  // One past the last key of the row whose own key is own_end - 1.
  __device__ __forceinline__ int end(int own_end) const {
    return CHUNKED ? at_most(chunk_begin(own_end - 1) + chunk, own_end + right) : own_end + right;
  }
  __device__ __forceinline__ bool has(int own, int key) const {
    if (CHUNKED) return key >= first(own) && (CAUSAL || key < end(own + 1));
    return key - own >= -left && (CAUSAL || key - own <= right);
  }
  // The own key of the first row that sees `key`, and one past that of the last row that sees key_end - 1.
  __device__ __forceinline__ int first_own(int key) const {
    return CHUNKED ? at_least(chunk_begin(key), key - right) : key - right;
  }
  __device__ __forceinline__ int end_own(int key_end) const {
    return CHUNKED ? at_most(chunk_begin(key_end - 1) + chunk, key_end + left) : key_end + left;
  }
};

DEVICE Reach reach_of(const Params& params) {
  return {params.window_left, params.window_right, params.attention_chunk};
}

// [0, sinks) and [begin, end): keys that at least one of some rows sees. No other key is read, whichever tile it falls
// into.
struct SeenKeys {
  int sinks, begin, end;

  __device__ __forceinline__ bool has(int key) const {
    return (key >= begin && key < end) || (WINDOW && SINK_TOKENS && key < sinks);
  }
  __device__ __forceinline__ bool has_any(int key_begin, int key_end) const {
    return (key_end > begin && key_begin < end) || (WINDOW && SINK_TOKENS && key_begin < sinks);
  }
};

#if POSITIONS
// The same if rows and keys have positions: which keys a row sees depends on positions, but arguments and results are
// indices.
//
//   a row at position p sees the keys at positions     p - left .. p + right (WINDOW; else all), below sink_tokens
//                                                      (SINK_TOKENS), and of them none after p (CAUSAL)
//
// Ranges of several rows or keys hold all that one of them sees; with steps above 1 they may hold others, which
// `visible` excludes.
struct Mask {
  static constexpr int diagonal = 0;  // for kernels to pass on; nothing is measured from it here

  int seqlen_k;
  Reach reach;
  int sink_tokens;
  Positions positions;

  __device__ __forceinline__ bool visible(int row, int key) const {
    if (key >= seqlen_k) return false;
    const int own = positions.row(row), position = positions.key(key);
    if (CAUSAL && position > own) return false;
    if (!WINDOW) return true;
    return reach.has(own, position) || (SINK_TOKENS && position < sink_tokens);
  }

  __device__ __forceinline__ bool all_visible(int row_begin, int row_end, int key_begin, int key_end) const {
    if (key_end > seqlen_k) return false;
    const int first_row = positions.row(row_begin), last_key = positions.key(key_end - 1);
    if (CAUSAL && last_key > first_row) return false;
    if (!WINDOW) return true;
    return positions.key(key_begin) >= reach.first(positions.row(row_end - 1)) &&
           (CAUSAL || last_key < reach.end(first_row + 1));
  }

  // Keys at a position or before it.
  __device__ __forceinline__ int keys_up_to(int position) const { return positions.keys.up_to(position, seqlen_k); }

  __device__ __forceinline__ SeenColumns columns(int row, int origin) const {
    const int own = positions.row(row);
    int end = CAUSAL ? keys_up_to(own) : seqlen_k;
    const int sinks = WINDOW && SINK_TOKENS ? at_most(end, keys_up_to(sink_tokens - 1)) : 0;
    if (WINDOW && !CAUSAL) end = at_most(end, keys_up_to(reach.end(own + 1) - 1));
    const int begin = WINDOW ? keys_up_to(reach.first(own) - 1) : 0;
    return {sinks - origin, begin - origin, end - origin};
  }

  // [0, sinks) and [first, last): keys that rows of [row_begin, row_end) see.
  __device__ __forceinline__ void range(int row_begin, int row_end, int& sinks, int& first, int& last) const {
    const int last_row = positions.row(row_end - 1);
    sinks = first = 0;
    last = CAUSAL ? keys_up_to(last_row) : seqlen_k;
    if (WINDOW && SINK_TOKENS) sinks = at_most(last, keys_up_to(sink_tokens - 1));
    if (WINDOW && !CAUSAL) last = at_most(last, keys_up_to(reach.end(last_row + 1) - 1));
    if (WINDOW) first = keys_up_to(reach.first(positions.row(row_begin)) - 1);
  }

  template <int TILE>
  __device__ __forceinline__ KeyTiles tiles(int row_begin, int row_end) const {
    int sinks, first, last;
    range(row_begin, row_end, sinks, first, last);
    sinks = (sinks + TILE - 1) / TILE;
    const int begin = at_least(sinks, first / TILE);
    const int end = first < last ? (last + TILE - 1) / TILE : 0;
    return {sinks, begin, at_least(begin, end)};
  }

  __device__ __forceinline__ SeenRows rows(int seqlen_q, int key_begin, int key_end) const {
    const int first_key = positions.key(key_begin), last_key = positions.key(key_end - 1);
    const bool sinks = SINK_TOKENS && first_key < sink_tokens;
    SeenRows seen{0, seqlen_q};
    if (CAUSAL) seen.begin = positions.rows.up_to(first_key - 1, seqlen_q);
    if (WINDOW && !CAUSAL && !sinks) seen.begin = positions.rows.up_to(reach.first_own(first_key) - 1, seqlen_q);
    if (WINDOW && !sinks) seen.end = positions.rows.up_to(reach.end_own(last_key + 1) - 1, seqlen_q);
    return seen;
  }
};

DEVICE Mask make_mask(const Params& params, int, int seqlen_k, int sequence) {
  return {seqlen_k, reach_of(params), params.sink_tokens, positions_of(params, sequence)};
}

DEVICE SeenKeys seen_keys(const Mask& mask, int row_begin, int row_end) {
  SeenKeys keys;
  mask.range(row_begin, row_end, keys.sinks, keys.begin, keys.end);
  return keys;
}
#else
struct Mask {
  int seqlen_k;
  int diagonal;
  Reach reach;
  int sink_tokens;

  __device__ __forceinline__ bool visible(int row, int key) const {
    const int own = row + diagonal;
    if (key >= seqlen_k) return false;
    if (CAUSAL && key - own > 0) return false;
    if (!WINDOW) return true;
    return reach.has(own, key) || (SINK_TOKENS && key < sink_tokens);
  }

  // Whether each row of [row_begin, row_end) sees each key of [key_begin, key_end), apart from sink tokens.
  __device__ __forceinline__ bool all_visible(int row_begin, int row_end, int key_begin, int key_end) const {
    if (key_end > seqlen_k) return false;
    if (CAUSAL && key_end - 1 > row_begin + diagonal) return false;
    if (!WINDOW) return true;
    return key_begin >= reach.first(row_end - 1 + diagonal) && (CAUSAL || key_end - 1 <= reach.end(row_begin + diagonal + 1) - 1);
  }

  // The keys that a row sees, counted from key `origin`. Far cheaper than `visible` where one row meets many keys.
  __device__ __forceinline__ SeenColumns columns(int row, int origin) const {
    const int own = row + diagonal - origin;  // the column on the diagonal
    int end = seqlen_k - origin;
    if (CAUSAL) end = at_most(own + 1, end);
    const int sinks = at_most(sink_tokens - origin, end);
    if (WINDOW && !CAUSAL) end = at_most(CHUNKED ? reach.end(own + 1 + origin) - origin : own + reach.right + 1, end);
    return {sinks, reach.first(own, origin), end};
  }

  // The tiles of TILE keys that hold a key which one of the rows [row_begin, row_end) sees. No other is visible.
  template <int TILE>
  __device__ __forceinline__ KeyTiles tiles(int row_begin, int row_end) const {
    int first = 0, last = seqlen_k;  // keys [first, last)
    if (CAUSAL) last = at_most(row_end + diagonal, last);
    int sinks = WINDOW && SINK_TOKENS ? at_least(0, at_most(last, sink_tokens)) : 0;
    if (WINDOW && !CAUSAL) last = at_most(reach.end(row_end + diagonal), last);
    if (WINDOW) first = at_least(0, reach.first(row_begin + diagonal));
    sinks = (sinks + TILE - 1) / TILE;
    const int begin = at_least(sinks, first / TILE);
    const int end = first < last ? (last + TILE - 1) / TILE : 0;
    return {sinks, begin, at_least(begin, end)};
  }

  // The rows of a sequence of seqlen_q that see at least one of the keys [key_begin, key_end).
  __device__ __forceinline__ SeenRows rows(int seqlen_q, int key_begin, int key_end) const {
    const bool sinks = SINK_TOKENS && key_begin < sink_tokens;
    SeenRows seen{0, seqlen_q};
    if (CAUSAL) seen.begin = at_least(0, key_begin - diagonal);
    if (WINDOW && !CAUSAL && !sinks) seen.begin = at_least(0, reach.first_own(key_begin) - diagonal);
    if (WINDOW && !sinks) seen.end = at_most(seqlen_q, reach.end_own(key_end) - diagonal);
    return seen;
  }
};

DEVICE Mask make_mask(const Params& params, int seqlen_q, int seqlen_k, int) {
  const int diagonal = TOP_LEFT ? 0 : seqlen_k - seqlen_q;
  return {seqlen_k, diagonal, reach_of(params), params.sink_tokens};
}

DEVICE SeenKeys seen_keys(const Mask& mask, int row_begin, int row_end) {
  SeenKeys keys{0, 0, mask.seqlen_k};
  if (CAUSAL) keys.end = at_most(row_end + mask.diagonal, keys.end);
  if (WINDOW && SINK_TOKENS) keys.sinks = at_most(keys.end, mask.sink_tokens);
  if (WINDOW && !CAUSAL) keys.end = at_most(mask.reach.end(row_end + mask.diagonal), keys.end);
  if (WINDOW) keys.begin = at_least(0, mask.reach.first(row_begin + mask.diagonal));
  return keys;
}
#endif
