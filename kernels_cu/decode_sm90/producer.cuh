// The producer of decode_sm90: one warp that brings tiles of keys and values into shared memory by TMA.
//
// A copy brings a box of `part` keys: a tile, or the largest power of two that divides the page size. Each lane looks up
// where one part lies, so that one wait for the table serves 32 of them:
//
//      lane    0       1       2       3       4 ..            pages of 16 keys, tiles of 64
//      part    0..15   16..31  32..47  48..63  0..15 ..
//              |--------- tile n ------------| |-- tile n + 1 ..
//
// All lanes wait, then one acts, with a __syncwarp() between: forward_sm90/producer.cuh says why.
#pragma once

#include "decode/pieces.cuh"
#include "decode/source.cuh"
#include "decode_sm90/layout.cuh"
#include "decode_sm90/params.cuh"

struct Producer {
  const Sm90DecodeParams& all;
  Shared shared;
  Ring<STAGES> ring{0, 1};

  // Where a part of a tile lies in the cache, as coordinates. A batch below 0 lies outside of it, where TMA reads nothing
  // and writes zeros.
  struct Place {
    int batch, row;
  };

  __device__ __forceinline__ int part() const {
    const int size = all.params.page_size;
    return PAGED ? at_most(BLOCK_N, size & -size) : BLOCK_N;
  }

  // The place of keys [key, key + part). The batch is negative if no row sees any of them.
  __device__ __forceinline__ Place find(const CacheSource& source, const SeenKeys& keys, int sequence, int key,
                                        int part) const {
    const bool ranged = key < keys.end && key + part > keys.begin;
    if (!ranged && key >= keys.sinks) return {-1, 0};
    if constexpr (!PAGED) return {sequence, key};
    const PagePlace place = source.pages.place(key);
    return {source.table[place.index], place.row};
  }

  __device__ __forceinline__ void load(const Entry& entry, int kv_head, const Piece& piece) {
    const CacheSource source = cache_source(all.params, entry.sequence, kv_head);
    const SeenKeys keys = seen_keys(entry.mask, entry.row_begin, entry.row_end);
    const int size = part(), parts = BLOCK_N / size, at_once = 32 / parts;  // tiles that are looked up together
    const int lane = lane_id();
    Place mine{-1, 0};
#pragma unroll 1
    for (int n = piece.first; n < piece.last; n++) {
      const int turn = (n - piece.first) % at_once;
      if (turn == 0) {
        const int tile = n + lane / parts;
        if (tile < piece.last) {
          mine = find(source, keys, entry.sequence, entry.tiles.at(tile) * BLOCK_N + lane % parts * size, size);
        }
      }
      const uint32_t full = shared.arrived(ring.stage);
      ptx::mbarrier_wait(shared.taken(ring.stage), ring.parity);
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, ARRIVING_BYTES);
#pragma unroll 1
      for (int p = 0; p < parts; p++) {
        const Place at{__shfl_sync(~0u, mine.batch, turn * parts + p), __shfl_sync(~0u, mine.row, turn * parts + p)};
        if (lane != 0) continue;
        load_part<ArrivingK>(&all.k, shared.arriving_k(ring.stage), full, p * size, kv_head, at);
        load_part<ArrivingV>(&all.v, shared.arriving_v(ring.stage), full, p * size, kv_head, at);
      }
      ring.advance();
    }
  }

  // first: the part's first row in the tile.
  template <class Tile>
  __device__ __forceinline__ void load_part(const ptx::TensorMap* map, uint32_t place, uint32_t full, int first, int head,
                                            const Place& at) {
#pragma unroll
    for (int box = 0; box < Tile::COUNT; box++) {
      ptx::tma_load(place + box * Tile::BOX_BYTES + first * Tile::LINE, map, full, box * Tile::WIDTH, at.row, head, at.batch);
    }
  }
};
