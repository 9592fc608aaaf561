// Which tile of rows a block works on, and when: the persistent schedule of forward_sm90.
//
//     tiles in order     section 0                                    section 1
//                        rows 384 ..:  head 0, head 1 .. head G - 1   rows 384 ..:  head G, ..
//                        rows 256 ..:  head 0, head 1 .. head G - 1   ...
//                        ...
//
// A section has as many heads as L2 can hold the keys and values of, so that the tiles of its heads find them there.
// With a mask, later rows see more keys and come first, so that short tiles are left to the end. A block takes the tile
// of its own number first and draws the numbers of further ones from a counter. Each tile draws once, for the one after
// it. So a launch draws `tiles` numbers, and the block that draws the last one sets the counter to 0 for the next
// launch.
#pragma once

#include "common/block_order.cuh"
#include "common/key_tiles.cuh"
#include "forward_sm90/layout.cuh"
#include "forward_sm90/params.cuh"

// A tile of rows of one head of one sequence, and the keys that they see.
struct Work {
  int sequence, head, kv_head;
  int seqlen_q;
  int row_begin;
  int q_start, k_start;  // rows before the sequence's first, in packed tensors
  Mask mask;
  Tiles keys;

  // Rows of the tile, up to the sequence's end.
  __device__ __forceinline__ int row_end() const { return at_most(seqlen_q, row_begin + BLOCK_M); }
  __device__ __forceinline__ bool exists() const { return row_begin < seqlen_q; }
  __device__ __forceinline__ bool sees_keys() const { return last_tile() >= 0; }

  // Tiles are taken from the last one to the first: their places in `keys`, -1 if there is none.
  __device__ __forceinline__ int last_tile() const { return tile_before(keys.count()); }
  __device__ __forceinline__ int tile_before(int n) const {
    n--;
#if BLOCK_MASK
    const SeenKeys seen = seen_keys(mask, row_begin, row_end());
    while (n >= 0 && !seen.has_any(first_key(n), first_key(n) + BLOCK_N)) n--;
#endif
    return n;
  }
  // The lists of a block mask lie in memory, where the compiler does not know that all lanes read the same value.
  __device__ __forceinline__ int first_key(int n) const {
    return (BLOCK_MASK ? ptx::warp_uniform(keys.at(n)) : keys.at(n)) * BLOCK_N;
  }

#if BLOCK_MASK
  __device__ __forceinline__ bool is_full(int n) const { return keys.is_full(n); }
#else
  __device__ __forceinline__ bool is_full(int) const { return false; }
#endif

  __device__ __forceinline__ void move_to(const LaunchParams& params, int row) {
    row_begin = row;
    keys = key_tiles(params, mask, sequence, head, row, row_end());
#if BLOCK_MASK
    // ptxas has registers for two lists, and spills if it knows that one of them is empty.
    const uint64_t full = reinterpret_cast<uint64_t>(keys.list.full.indices);
    uint32_t words[2] = {static_cast<uint32_t>(full), static_cast<uint32_t>(full >> 32)};
    ptx::pin_registers(words);
    keys.list.full.indices = reinterpret_cast<const int32_t*>(static_cast<uint64_t>(words[1]) << 32 | words[0]);
#endif
  }
};

DEVICE Work work_of(const LaunchParams& params, const Schedule& schedule, int tile) {
  const int section = divide(tile, schedule.section_tiles), first_head = section * schedule.section_heads;
  const int within = tile - section * static_cast<int>(schedule.section_tiles.divisor);
  const bool shortened = first_head + schedule.section_heads > schedule.all_heads;
  const int row_tile = divide(within, shortened ? schedule.last_section : schedule.section);
  const int heads = shortened ? schedule.all_heads - first_head : schedule.section_heads;
  const int sequence_head = first_head + within - row_tile * heads;

  Work work;
  work.sequence = divide(sequence_head, schedule.heads);
  work.head = sequence_head - work.sequence * params.heads_q;
  work.kv_head = divide(work.head, schedule.head_group);
  work.q_start = work.k_start = 0;
  work.seqlen_q = params.seqlen_q;
  int seqlen_k = params.seqlen_k;
  if constexpr (VARLEN) {
    work.q_start = params.cu_seqlens_q[work.sequence];
    work.seqlen_q = params.cu_seqlens_q[work.sequence + 1] - work.q_start;
  }
  if constexpr (PACKED_KEYS) {
    work.k_start = params.cu_seqlens_k[work.sequence];
    seqlen_k = params.cu_seqlens_k[work.sequence + 1] - work.k_start;
  }
  if constexpr (CACHE_LENGTHS) seqlen_k = schedule.cache_seqlens[work.sequence];
  work.mask = make_mask(params, work.seqlen_q, seqlen_k, work.sequence);
  work.move_to(params, (UNEVEN ? schedule.row_tiles - 1 - row_tile : row_tile) * BLOCK_M);
  return work;
}

// Where a key's row lies: coordinates of the tensor (rows, batch), of which pages are a batch.
struct KeyPlace {
  int row, batch;
};

DEVICE KeyPlace place_of_key(const Schedule& schedule, const Work& work, int key) {
  if constexpr (PAGE_SIZE > 0) {
    const int32_t* const pages = schedule.block_table + work.sequence * schedule.block_table_stride;
    // Without a page TMA brings zeros. The table is not read past the last page.
    constexpr int NO_PAGE = -1;
    return {key % PAGE_SIZE, key < work.mask.seqlen_k ? pages[key / PAGE_SIZE] : NO_PAGE};
  }
  return {work.k_start + key, PACKED_KEYS ? 0 : work.sequence};
}

// Calls `attend` for the tile's rows; more than once only if a sequence is longer than the caller said, because lengths
// on the device cannot be checked before.
template <class Attend>
DEVICE void for_each_row_tile(const Sm90Params& all, Work& work, Attend&& attend) {
  while (work.exists()) {
    attend(work);
    if (!VARLEN) break;
    work.move_to(all.params, work.row_begin + all.schedule.row_tiles * BLOCK_M);
  }
}

// The producer's side of handing tiles to the consumers.
struct TileSource {
  Ring<SLOTS> slot{0, 1};
  int tile = static_cast<int>(blockIdx.x);

  // Tells the consumers which tile comes next; false if none does. The whole warp calls it.
  __device__ __forceinline__ bool announce(const Shared& shared, const Schedule& schedule, bool leader) {
    const bool more = tile < schedule.tiles;
    ptx::mbarrier_wait(shared.tile_empty(slot.stage), slot.parity);
    __syncwarp();
    if (leader) {
      ptx::store_shared(shared.tile(slot.stage), static_cast<uint32_t>(more ? tile : NO_TILE));
      ptx::mbarrier_arrive(shared.tile_full(slot.stage));
    }
    slot.advance();
    return more;
  }

  // Draws a number from the counter, ahead of its use, because L2 answers only after a few tiles of keys.
  __device__ __forceinline__ int draw(const Schedule& schedule, bool leader) {
    if (!leader) return 0;
    const int drawn = atomicAdd(schedule.counter, 1);
    if (drawn == schedule.tiles - 1) *schedule.counter = 0;
    return drawn;
  }

  __device__ __forceinline__ void take(int drawn) { tile = static_cast<int>(gridDim.x) + ptx::warp_uniform(drawn); }

  static constexpr int NO_TILE = -1;
};

// The consumers' side: the next tile, or NO_TILE.
struct TileSink {
  Ring<SLOTS> slot{0, 0};

  __device__ __forceinline__ int next(const Shared& shared) {
    ptx::mbarrier_wait(shared.tile_full(slot.stage), slot.parity);
    // Uniform for the compiler too. If the tile could differ between lanes, descriptors would be kept in vector
    // registers and moved over in every iteration of the main loop.
    const int tile = ptx::warp_uniform(static_cast<int>(ptx::load_shared(shared.tile(slot.stage))));
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(shared.tile_empty(slot.stage));
    slot.advance();
    return tile;
  }
};
