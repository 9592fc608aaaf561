// The parameters of a launch of forward_sm90: tensor maps, those of every forward kernel, and the schedule.
//
// gpu_actors/kernels/forward_sm90.py packs it; it reads the structs from this text.
#pragma once

#include "ptx/types.cuh"
#include "common/score.cuh"

struct Divider {  // n / divisor = n * multiplier / 2^(32 + shift) for 0 <= n < 2^31; multiplier 0 stands for 1
  uint32_t divisor;
  uint32_t multiplier;
  uint32_t shift;
};

// The order of the tiles is drawn in forward_sm90/schedule.cuh.
struct Schedule {
  int32_t* counter;              // 0 between launches
  const int32_t* cache_seqlens;  // keys of each sequence, if CACHE_LENGTHS
  const int32_t* block_table;    // pages of each sequence, if PAGE_SIZE
  int64_t block_table_stride;    // entries from one sequence to the next
  int32_t tiles;
  int32_t row_tiles;      // of a sequence
  int32_t all_heads;      // heads_q of all sequences
  int32_t section_heads;  // of these, how many have their keys and values in L2 together
  Divider heads;          // heads_q
  Divider head_group;     // query heads a KV head
  Divider section;        // section_heads
  Divider section_tiles;  // tiles of a section
  Divider last_section;   // heads of the last section
};

struct Sm90Params {
  ptx::TensorMap q, k, v, out;  // (dim, rows, heads, batch), with the rows of all sequences together if VARLEN
  LaunchParams params;
  Schedule schedule;
};
static_assert(sizeof(ptx::TensorMap) == 128 && alignof(ptx::TensorMap) == 64, "as the driver encodes it");
static_assert(sizeof(LaunchParams) % 8 == 0, "the schedule follows without a gap");

DEVICE int divide(int n, const Divider& by) {
  return by.multiplier == 0 ? n : static_cast<int>(__umulhi(static_cast<uint32_t>(n), by.multiplier) >> by.shift);
}
