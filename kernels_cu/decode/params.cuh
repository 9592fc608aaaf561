// The parameters of the decode kernels beyond the macros and the Params of common/params.cuh: where cached keys and
// values lie, how long each sequence is, and how the work is split.
//
// In `attention`, k and v are the pools or caches themselves: their `batch` stride is that of a page if PAGED, of a
// sequence otherwise, and `row` and `head` are within it. If POINTERS, k and v are null. Rows begin at multiples of
// CACHE_ALIGNMENT bytes, and none of their strides is negative.
//
// gpu_actors/kernels/decode_mma.py reads the struct from this text: one field a line, of a type that it knows.
#pragma once

#include "common/params.cuh"

// Of one sequence's arrays; strides in elements.
struct CacheLayout {
  int64_t k_head, k_row, v_head, v_row, capacity;
};

struct DecodeParams {
  Params attention;
  const int32_t* seq_lens;  // keys of each sequence, those of the new rows included
  const int32_t* block_table;  // PAGED: what lies past a sequence's last page is never read
  const uint64_t* k_ptrs;  // POINTERS
  const uint64_t* v_ptrs;
  const uint64_t* tree_mask;  // TREE: bit j of a row's word is the j-th new key
  int32_t* plan;  // ranges + 1 positions of 4 words, see decode/plan.cuh
  int64_t* sums;  // of the plan kernel: units before each entry
  float* partial_out;  // (slots, BLOCK_M, HEAD_DIM_V); of decode_simple Reals, like partial_sums
  float* partial_sums;  // (slots, BLOCK_M, 2): the LSE is the first plus the second's logarithm
  int64_t table_stride;
  Strides tree_mask_strides;
  int32_t batch;
  int32_t page_size;
  uint32_t page_factor;  // a key's page: the upper 32 bits of key * page_factor, shifted right by page_shift
  int32_t page_shift;
  int32_t capacity;  // keys that a sequence can have
  int32_t row_tiles;  // of the longest sequence
  int32_t ranges;  // that the work is split into, one a block
  int32_t splits;  // pieces of every item, or 0 if pieces end with the ranges
  int32_t min_units;  // of a range
  int32_t item_units;  // that beginning an item is counted as
  int32_t cache_sequences;  // of the cache, if BATCH_IDX
  const int32_t* cache_batch_idx;  // BATCH_IDX
  const int32_t* cache_leftpad;  // LEFTPAD: seq_lens also count what lies before the keys
  const CacheLayout* cache_layouts;  // OWN_LAYOUTS: of each sequence
};
