// Every macro that a kernel is compiled for: what it means, and its value if a variant gives none.
//
// The first part has options. The second part has sizes and types, which every variant gives; they have values here
// only for an editor (GPU_ACTORS_EDITOR, in compile_flags.txt), so that clangd can open any kernel by itself.
#pragma once

// ---- options: 0 or 1 unless said otherwise, and without cost when 0
#ifndef VARLEN  // packed sequences with cu_seqlens instead of a batch dimension
#define VARLEN 0
#endif
#ifndef CAUSAL
#define CAUSAL 0
#endif
#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef SINK_TOKENS
#define SINK_TOKENS 0
#endif
#ifndef CHUNKED  // a row sees only the keys of its own key's chunk; WINDOW is 1 then
#define CHUNKED 0
#endif
#ifndef TOP_LEFT  // the diagonal starts at key 0 instead of ending at the last key
#define TOP_LEFT 0
#endif
#ifndef POSITIONS  // rows and keys have positions in a larger problem: see common/positions.cuh. Of append: a row has a
                   // position to be rotated by; else it is the row's place in its sequence
#define POSITIONS 0
#endif
#ifndef SOFTCAP
#define SOFTCAP 0
#endif
#ifndef ALIBI
#define ALIBI 0
#endif
#ifndef ALIBI_SIGNED  // keys after a row's own gain what keys before it lose
#define ALIBI_SIGNED 0
#endif
#ifndef SINKS
#define SINKS 0
#endif
#ifdef BIAS_ELEMENT  // the bias's type; not given if there is no bias
#define BIAS 1
#else
#define BIAS 0
#define BIAS_ELEMENT float
#endif
#ifndef BIAS_HIDES  // the bias is a mask of bytes: keys whose byte is 0 are hidden
#define BIAS_HIDES 0
#endif
#define BIAS_GRADIENT (BIAS && !BIAS_HIDES)
#ifndef DROPOUT
#define DROPOUT 0
#endif
#ifndef DESCALES
#define DESCALES 0
#endif
#ifndef LSE
#define LSE 0
#endif
#ifndef WIDE_LSE  // the LSE is double, of double inputs
#define WIDE_LSE 0
#endif
#ifndef ROW_STATS  // each row's largest score and the sum of exponentials relative to it are stored, beside the LSE
#define ROW_STATS 0
#endif
#ifndef COMPUTE_BITS  // significant bits of q, k and v as operands: 24 keeps float whole
#define COMPUTE_BITS 24
#endif
#ifndef TIES_AWAY  // operands midway between two are rounded away from 0, as by cvt.rna.tf32; else to even
#define TIES_AWAY 0
#endif

// Of backward.
#ifndef DETERMINISTIC  // sums over blocks are taken in one order
#define DETERMINISTIC 0
#endif
#ifndef NATURAL_LSE  // weights are computed from scores, and not from products in base 2
#define NATURAL_LSE 0
#endif
#ifndef SUMMED_Q  // sequences share q, and backward_sum adds up their dQ, stored unrounded; SUMMED_K, .. likewise
#define SUMMED_Q 0
#endif
#ifndef SUMMED_K
#define SUMMED_K 0
#endif
#ifndef SUMMED_V
#define SUMMED_V 0
#endif
#ifndef DS_BITS  // dS is scaled so that what bounds it lies between 2^DS_BITS and twice that; 0: dS is not scaled
#define DS_BITS 0
#endif
#ifndef WARP_TILE  // keys, and rows of dQ, that a warp of backward_mma takes: 16 or, with operands read half as often, 32
#define WARP_TILE 16
#endif
#ifndef REDUCE_WIDTH  // floats that one reduction to global memory takes: 4 from sm_90 on
#define REDUCE_WIDTH 1
#endif

// Of caches: decode and append.
#ifndef PAGED  // keys and values lie in pages of a pool, found by a block table
#define PAGED 0
#endif
#ifndef SINGLE  // pages hold one key each
#define SINGLE 0
#endif
#ifndef POINTERS  // each sequence has a cache of its own, found by its address
#define POINTERS 0
#endif
#ifndef OWN_LAYOUTS  // the arrays of POINTERS have capacities and strides of their own
#define OWN_LAYOUTS 0
#endif
#ifndef BATCH_IDX  // an index says which of a dense cache's sequences each sequence has
#define BATCH_IDX 0
#endif
#ifndef LEFTPAD  // the keys of a sequence begin behind some that are padding
#define LEFTPAD 0
#endif
#ifndef CACHE_ALIGNMENT  // rows of caches begin at multiples of so many bytes
#define CACHE_ALIGNMENT 16
#endif
#ifndef VALUE_WARPS  // warps that share a row's columns of V; each multiplies all of the row's keys itself
#define VALUE_WARPS 1
#endif
#ifndef Q_ELEMENT  // q's type, if it is not ELEMENT, to which it is then widened
#define Q_ELEMENT ELEMENT
#endif
#ifndef LATENT  // values are the first columns of keys, and are read with them
#define LATENT 0
#endif
#ifndef TREE  // a bit mask for each row says which of the new keys it sees
#define TREE 0
#endif

// Of append.
#ifndef ROTARY_DIM  // columns of K (and q) that are rotated, the first ones; 0 rotates none
#define ROTARY_DIM 0
#endif
#ifndef INTERLEAVED  // columns 2i and 2i + 1 are a pair; else i and i + ROTARY_DIM / 2
#define INTERLEAVED 0
#endif
#ifndef TABLES  // cosines and sines are given; else they follow from the position and the pair's step
#define TABLES 0
#endif
#ifndef QUERY  // q is rotated, too
#define QUERY 0
#endif

// Of forward_sm90.
#ifndef O_DIRECT  // the output leaves from registers, because shared memory has no room for it
#define O_DIRECT 0
#endif
#ifndef PIECES  // of V's columns that are summed one after the other, each apart from O
#define PIECES 1
#endif
#ifndef CACHE_LENGTHS  // the keys of a sequence end where cache_seqlens says
#define CACHE_LENGTHS 0
#endif
#ifndef PAGE_SIZE  // keys a page, and a block table tells which pages; 0: keys follow each other
#define PAGE_SIZE 0
#endif

// Of merge_gradients.
#ifndef SUM_SINKS  // the second launch, which sums the rows of each sink
#define SUM_SINKS 0
#endif

// ---- sizes and types, for an editor
#ifdef GPU_ACTORS_EDITOR
#define HEAD_DIM 64
#define HEAD_DIM_V 64
#define STAGES 2    // of the ring of tiles
#if defined(GPU_ACTORS_EDITOR_HOPPER_BACKWARD)
#define BLOCK_M 128
#define BLOCK_N 128
#define WARPS 12
#define DQ_FLOATS (BLOCK_M * HEAD_DIM)
#elif defined(GPU_ACTORS_EDITOR_HOPPER)
#define BLOCK_M 128
#define BLOCK_N 64
#define WARPS 12
#elif defined(GPU_ACTORS_EDITOR_HOPPER_DECODE)
#define BLOCK_M 64
#define BLOCK_N 64
#define WARPS 8
#elif defined(GPU_ACTORS_EDITOR_WIDE)
#define BLOCK_M 64
#define BLOCK_N 32
#define WARPS 8
#else
#define BLOCK_M 64  // rows a tile
#define BLOCK_N 64  // keys a tile
#define WARPS 4     // of a block
#endif
#define ELEMENT half_t      // of q, or what it is widened to
#define KV_ELEMENT half_t   // of k and v
#define OUT_ELEMENT half_t  // of the output, or of gradients
// Of a block, in bytes: what the kernel lays out.
#define SHARED_BYTES LAYOUT_BYTES
// Of backward: floats of dQ a slot, which the kernels assert.
#ifndef DQ_FLOATS
#define DQ_FLOATS (2 * QueryColumns::PAIRS * 4 * THREADS)
#endif
// Of append: the caches' type, the most rows a block, and units of 16 bytes of a row of each operand.
#define CACHE_ELEMENT half_t
#define MAX_ROWS 64
#define K_UNITS 8
#define V_UNITS 8
#define Q_UNITS 8
// Of merge and merge_gradients: the type of the partials' LSE.
#define LSE_ELEMENT float
// Of copy_pages: bytes of a page that a block copies.
#define PART_BYTES 16384
#endif
