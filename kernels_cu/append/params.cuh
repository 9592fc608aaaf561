// The parameters of a launch of the append kernel. common/defaults.cuh has its compile-time options.
//
// gpu_actors/kernels/append.py reads struct Params from this text: one field a line, of a type that it knows. The
// innermost dimension of every operand is contiguous.
#pragma once

#include "common/defaults.cuh"
#include "common/types.cuh"

#ifndef HEAD_DIM
#error "HEAD_DIM, HEAD_DIM_V, WARPS, MAX_ROWS, SHARED_BYTES, K_UNITS, V_UNITS, ELEMENT and CACHE_ELEMENT must be given"
#endif

struct Params {  // pointers to operands that the variant does not use are null
  const void* k;  // the new rows, packed: (total, heads_kv, HEAD_DIM)
  const void* v;
  const void* q;
  void* q_rotated;
  void* k_cache;  // pages or sequences, or with POINTERS the addresses of the sequences' caches
  void* v_cache;
  const int32_t* cu_seqlens;  // null if every sequence has `rows` new ones
  const int32_t* cache_seqlens;  // keys of each sequence, the new ones included
  const int32_t* block_table;
  const int32_t* positions;
  const float* rope_cos;  // (table_rows, ROTARY_DIM / 2), like rope_sin
  const float* rope_sin;
  const float* k_descale;  // (batch, heads_kv), like v_descale; null stands for factors of 1
  const float* v_descale;
  int64_t k_row;  // strides in elements
  int64_t k_head;
  int64_t v_row;
  int64_t v_head;
  int64_t q_row;
  int64_t q_head;
  int64_t q_rotated_row;
  int64_t q_rotated_head;
  int64_t k_cache_block;  // from a page or a sequence to the next; 0 with POINTERS
  int64_t k_cache_row;
  int64_t k_cache_head;
  int64_t v_cache_block;
  int64_t v_cache_row;
  int64_t v_cache_head;
  int64_t block_table_row;
  int64_t rope_cos_row;
  int64_t rope_sin_row;
  int64_t k_descale_row;
  int64_t k_descale_head;
  int64_t v_descale_row;
  int64_t v_descale_head;
  int32_t batch;
  int32_t total;  // new rows
  int32_t rows;  // of each sequence, if cu_seqlens is null
  int32_t heads_kv;
  int32_t heads_q;
  int32_t capacity;  // rows that a sequence may have in its cache
  int32_t page_size;
  int32_t num_blocks;
  int32_t table_rows;
  int32_t block_rows;  // new rows of a thread block
  int32_t parts;  // blocks that share those rows
  int32_t part_units;  // units of those rows that each block takes
};

// The angle of pair i grows by steps[i] * 2^-64 turns a position. In 64 bits whole turns overflow, so the rest is exact
// for positions however large.
struct Arguments {
  Params params;
#if ROTARY_DIM && !TABLES
  uint64_t steps[ROTARY_DIM / 2];
#endif
};
