// Cached keys and values of one sequence and KV head, and the copying of their tiles to shared memory.
//
//   PAGED      key -> page block_table[sequence][key / page_size], row key % page_size of it
//   POINTERS   key -> row `key` of the cache at k_ptrs[sequence]
//   otherwise  key -> row `key` of the sequence's part of one cache, of part cache_batch_idx[sequence] where BATCH_IDX
//
// With LEFTPAD the first key is stored behind cache_leftpad[sequence] others.
//
// A thread copies the same few rows of every tile. It looks their pages up one tile ahead, so that the copies do not
// wait for the table, and once for all chunks of K and V.
#pragma once

#include "decode/plan.cuh"
#include "mma/tile.cuh"

// Where rows of K or of V lie. Strides are in chunks of CACHE_ALIGNMENT bytes, so that 32 bits hold them and a product
// is one instruction.
struct CacheRows {
  static constexpr int CHUNK = CACHE_ALIGNMENT / sizeof(KV_ELEMENT);

  const KV_ELEMENT* base;  // of the KV head: in page 0 if PAGED
  uint32_t page_stride, row_stride;

  __device__ __forceinline__ const KV_ELEMENT* at(int page, int row) const {
    const uint64_t chunks = uint64_t(uint32_t(row)) * row_stride + (PAGED ? uint64_t(uint32_t(page)) * page_stride : 0);
    return base + chunks * CHUNK;
  }
};

// Where a key lies: the page's place in the sequence's table, and the row in the page.
struct PagePlace {
  int index, row;
};

struct Pages {
  uint32_t factor;
  int shift, size;
#if LEFTPAD
  int padding;
  __device__ __forceinline__ int stored(int key) const { return key + padding; }
#else
  __device__ __forceinline__ int stored(int key) const { return key; }
#endif

  __device__ __forceinline__ PagePlace place(int key) const {
#if LEFTPAD
    key = stored(key);
#endif
    if constexpr (SINGLE) return {key, 0};  // no factor of 32 bits divides by 1
    const int index = int(__umulhi(uint32_t(key), factor) >> shift);
    return {index, key - index * size};
  }
};

// The rows of a tile that a thread copies, at the places of their keys.
template <class Tile, int THREADS>
struct Lookup {
  using Mine = Share<Tile, THREADS>;
  static constexpr int ROWS = (Tile::ROWS + Mine::ROWS_AT_ONCE - 1) / Mine::ROWS_AT_ONCE;

  int page[ROWS];
  int row[ROWS];  // in the page; -1: not read

  // first: the tile's first key.
  __device__ __forceinline__ void find(const int32_t* table, const Pages& pages, const SeenKeys& keys, int first) {
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      const int in_tile = Mine::row() + i * Mine::ROWS_AT_ONCE, key = first + in_tile;
      const bool read = in_tile < Tile::ROWS && keys.has(key);
      page[i] = 0;
      row[i] = read ? pages.stored(key) : -1;
      if (PAGED && read) {
        const PagePlace place = pages.place(key);
        page[i] = table[place.index];
        row[i] = place.row;
      }
    }
  }

  // Starts copying the rows. Rows that are not read, and columns past the last one, are filled with zeros.
  __device__ __forceinline__ void copy(const Tile& tile, const CacheRows& rows) const {
    const LaneAddress to = tile.lane(Mine::row(), Mine::chunk());
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      if (Tile::ROWS % Mine::ROWS_AT_ONCE != 0 && Mine::row() + i * Mine::ROWS_AT_ONCE >= Tile::ROWS) break;
      const bool read = row[i] >= 0;
      const KV_ELEMENT* const from = rows.at(page[i], read ? row[i] : 0) + Mine::chunk() * Tile::CHUNK;
#pragma unroll
      for (int chunks = 0; chunks < Tile::CHUNKS; chunks += Mine::LANES) {
        const bool inside = Tile::USED == Tile::CHUNKS || Mine::chunk() + chunks < Tile::USED;
        const uint32_t place = to.at<Tile>(i * Mine::ROWS_AT_ONCE, chunks);
        ptx::cp_async<16>(place, from + chunks * Tile::CHUNK, read && inside ? 16 : 0);
      }
    }
  }
};

// K and V of one sequence and KV head.
struct CacheSource {
  CacheRows k, v;
  const int32_t* table;
  Pages pages;

  // The row of K or of V of a key.
  __device__ __forceinline__ const KV_ELEMENT* row(const CacheRows& rows, int key) const {
    if (!PAGED) return rows.at(0, pages.stored(key));
    const PagePlace place = pages.place(key);
    return rows.at(table[place.index], place.row);
  }
  __device__ __forceinline__ const KV_ELEMENT* value(int key) const { return row(v, key); }
};

DEVICE CacheRows cache_rows(const void* pool, const uint64_t* pointers, const Strides& strides, int sequence,
                            int head) {
  if constexpr (POINTERS) pool = reinterpret_cast<const void*>(pointers[sequence]);
  const auto base = element_of<const KV_ELEMENT>(pool, strides, PAGED || POINTERS ? 0 : sequence, 0, head);
  return {base, uint32_t(strides.batch / CacheRows::CHUNK), uint32_t(strides.row / CacheRows::CHUNK)};
}

DEVICE CacheSource cache_source(const DecodeParams& params, int sequence, int head) {
  const Params& attention = params.attention;
#if OWN_LAYOUTS
  const CacheLayout& own = params.cache_layouts[sequence];
  const Strides k{0, own.k_row, own.k_head}, v{0, own.v_row, own.v_head};
#else
  const Strides &k = attention.k_strides, &v = attention.v_strides;
#endif
  const int place = BATCH_IDX ? params.cache_batch_idx[sequence] : sequence;
  return {cache_rows(attention.k, params.k_ptrs, k, place, head),
          cache_rows(attention.v, params.v_ptrs, v, place, head),
          PAGED ? params.block_table + sequence * params.table_stride : nullptr,
          {params.page_factor, params.page_shift, params.page_size
#if LEFTPAD
           , params.cache_leftpad[sequence]
#endif
          }};
}
