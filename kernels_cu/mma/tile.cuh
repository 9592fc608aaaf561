// Tiles of q, k and v in shared memory: 16-byte chunks that cp.async fills and ldmatrix reads without bank conflicts.
//
//   head_dim 64, 16 bits: 8 chunks a row       head_dim 96: 12 chunks a row, two rows pass the 32 banks three times
//     row 0   0 1 2 3 4 5 6 7                    row 0   0 1 2 3   4 5 6 7   8 9 a b
//     row 1   1 0 3 2 5 4 7 6                    row 1   0 1 2 3   4 5 6 7   8 9 a b
//     row 2   2 3 0 1 6 7 4 5                    row 2   1 0 3 2   5 4 7 6   9 8 b a
//     ...     place = chunk ^ row % 8            ...     place = chunk ^ row / 2 % 4
//
// ldmatrix reads one chunk of eight neighbouring rows at a time. Their places must differ modulo 8 chunks (128 bytes,
// all banks). A row length with a factor FACTOR of 8 brings back the same place every 8 / FACTOR rows; from there on
// the place is XORed with the next number, which stays inside the row because FACTOR divides its length.
#pragma once

#include "ptx/copy_async.cuh"
#include "ptx/memory.cuh"
#include "common/params.cuh"

// Where a lane's chunk of a tile lies, and the chunks an even number of places from it in the same row or in rows 8
// and more further on. Whole FACTORs of chunks and whole rows are constants there, which instructions take as
// immediate offsets.
struct LaneAddress {
  uint32_t row;     // of the row's first byte
  uint32_t spread;  // what the chunks' byte offsets are XORed with

  template <class Tile>
  __device__ __forceinline__ uint32_t at(int rows, int chunks) const {
    const uint32_t whole = chunks / Tile::FACTOR * Tile::FACTOR;
    return row + (uint32_t((chunks - whole) * 16) ^ spread) + (rows * Tile::PITCH + whole * 16);
  }
};

// WIDTH elements a row, rounded up to two chunks, which is one step of an mma.
template <int ROW_COUNT, int WIDTH, class Element>
struct Tile {
  static constexpr int ROWS = ROW_COUNT;
  static constexpr int CHUNK = 16 / sizeof(Element);  // elements
  static constexpr int USED = WIDTH / CHUNK;
  static constexpr int CHUNKS = (USED + 1) / 2 * 2;
  static constexpr int PITCH = CHUNKS * 16;
  static constexpr int BYTES = ROWS * PITCH;
  static constexpr int FACTOR = CHUNKS % 8 == 0 ? 8 : CHUNKS % 4 == 0 ? 4 : 2;
  static_assert(USED * CHUNK == WIDTH, "rows are whole chunks of 16 bytes");
  static_assert(ROWS % 8 == 0, "eight rows at a time are read");

  uint32_t base;

  static __device__ __forceinline__ uint32_t spread(uint32_t row) { return row / (8 / FACTOR) % FACTOR; }

  __device__ __forceinline__ LaneAddress lane(int row, int chunk) const {
    return {base + row * PITCH, (uint32_t(chunk) ^ spread(row)) * 16};
  }
};

// Rows of an operand in global memory. If the rows do not all begin at multiples of 16 bytes, cp.async cannot take
// them.
template <class Element>
struct RowSource {
  const Element* rows;
  int64_t stride;  // in elements
  bool aligned;
};

template <class Element>
DEVICE RowSource<Element> row_source(const Element* rows, int64_t stride) {
  const bool aligned = (reinterpret_cast<uint64_t>(rows) | uint64_t(stride) * sizeof(Element)) % 16 == 0;
  return {rows, stride, aligned};
}

// Loads sixteen bytes of elements of any alignment.
template <class Element>
DEVICE void gather(uint32_t (&words)[4], const Element* elements) {
  constexpr int PER_WORD = 4 / sizeof(Element);
#pragma unroll
  for (int w = 0; w < 4; w++) {
    if constexpr (PER_WORD == 1) {
      words[w] = ptx::as_bits(elements[w]);
    } else if constexpr (PER_WORD == 4) {
      words[w] = elements[4 * w].bits | uint32_t(elements[4 * w + 1].bits) << 8 |
                 uint32_t(elements[4 * w + 2].bits) << 16 | uint32_t(elements[4 * w + 3].bits) << 24;
    } else {
      words[w] = elements[2 * w].bits | uint32_t(elements[2 * w + 1].bits) << 16;
    }
  }
}

// A thread's share of a tile: neighbouring lanes take neighbouring chunks of a row.
template <class Tile, int THREADS>
struct Share {
  static constexpr int LANES = Tile::FACTOR, ROWS_AT_ONCE = THREADS / LANES;
  static_assert(ROWS_AT_ONCE % 8 == 0, "a thread's rows are spread alike");

  static __device__ __forceinline__ int row() { return int(threadIdx.x) / LANES; }
  static __device__ __forceinline__ int chunk() { return int(threadIdx.x) % LANES; }

  // Calls visit(rows, chunks) for every chunk that lies so many rows and chunks on from the thread's first.
  template <int UNROLL, class Visit>
  static __device__ __forceinline__ void for_each(Visit visit) {
#pragma unroll UNROLL
    for (int rows = 0; rows < Tile::ROWS; rows += ROWS_AT_ONCE) {
      if (Tile::ROWS % ROWS_AT_ONCE != 0 && rows + row() >= Tile::ROWS) break;
#pragma unroll UNROLL
      for (int chunks = 0; chunks < Tile::CHUNKS; chunks += LANES) visit(rows, chunks);
    }
  }
};

// Starts copying the tile's rows. Zeros if wanted(row) is false and past the last column, where nothing is read.
template <int THREADS, class Tile, class Element, class Wanted>
DEVICE void copy_rows(const Tile& tile, const RowSource<Element>& source, Wanted wanted) {
  using Mine = Share<Tile, THREADS>;
  const LaneAddress to = tile.lane(Mine::row(), Mine::chunk());
  const Element* const from = source.rows + Mine::row() * source.stride + Mine::chunk() * Tile::CHUNK;
  const auto read = [&](int rows, int chunks) {
    return wanted(Mine::row() + rows) && (Tile::USED == Tile::CHUNKS || Mine::chunk() + chunks < Tile::USED);
  };
  if (source.aligned) {
    Mine::template for_each<64>([&](int rows, int chunks) {
      const Element* const elements = from + rows * source.stride + chunks * Tile::CHUNK;
      ptx::cp_async<16>(to.at<Tile>(rows, chunks), elements, read(rows, chunks) ? 16 : 0);
    });
  } else {
    Mine::template for_each<1>([&](int rows, int chunks) {
      uint32_t words[4] = {};
      if (read(rows, chunks)) gather(words, from + rows * source.stride + chunks * Tile::CHUNK);
      ptx::store_shared_v4(to.at<Tile>(rows, chunks), words);
    });
  }
}

// Rounds what this thread copied of a tile of floats, in place, to BITS significant bits. Its copies must have landed.
template <int BITS, int THREADS, class Tile>
DEVICE void round_rows(const Tile& tile) {
  using Mine = Share<Tile, THREADS>;
  const LaneAddress at = tile.lane(Mine::row(), Mine::chunk());
  Mine::template for_each<2>([&](int rows, int chunks) {
    uint32_t words[4];
    ptx::load_shared_v4(words, at.at<Tile>(rows, chunks));
#pragma unroll
    for (int w = 0; w < 4; w++) words[w] = ptx::as_bits(round_operand<BITS>(ptx::as_float(words[w])));
    ptx::store_shared_v4(at.at<Tile>(rows, chunks), words);
  });
}
