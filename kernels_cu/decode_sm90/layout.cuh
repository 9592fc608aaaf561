// Sizes of decode_sm90, and the layout of its shared memory.
//
//     stage 0: K | V     stage 1: K | V     ..     full, empty: mbarriers of each stage     a word: nonfinite values found
//
// K and V lie in the boxes of forward_sm90/boxes.cuh. Q, the scores and the output are in registers. For 8-bit caches
// STAGES stages hold K and V as they arrive, and DEPTH others, with their own barriers, hold them widened.
#pragma once

#include "decode/widen.cuh"
#include "forward_sm90/boxes.cuh"

constexpr int operand_dim(int dim) { return !NARROW ? padded_dim(dim) : dim <= 64 ? 64 : 128; }
constexpr int DIM = operand_dim(HEAD_DIM), DIM_V = operand_dim(HEAD_DIM_V);
constexpr int DEPTH = NARROW ? 2 : STAGES;  // stages of what is multiplied
constexpr int ROWS = 64;  // of a consumer: a wgmma has as many
constexpr int CONSUMERS = BLOCK_M / ROWS;
constexpr int CONSUMER_THREADS = CONSUMERS * WARPGROUP;

static_assert(BLOCK_M == ROWS * CONSUMERS && (CONSUMERS == 1 || CONSUMERS == 2), "one or two warpgroups multiply");
static_assert(WARPS == 4 * (CONSUMERS + 1 + NARROW), "one more warpgroup loads, and one widens 8-bit floats");
static_assert(BLOCK_N % 32 == 0 && BLOCK_N <= 256, "keys are N of one product and K of the other");
static_assert(sizeof(ELEMENT) == 2, "products are of 16 bits");
static_assert(!POINTERS && !LATENT && !BATCH_IDX && !LEFTPAD && !(TREE && POSITIONS), "decode_mma has these caches");
static_assert(DIM <= 128 && DIM_V <= 128, "Q and O are in registers");
static_assert(STAGES >= 2, "keys land while others are multiplied");

using KBoxes = Boxes<BLOCK_N, DIM>;
using VBoxes = Boxes<BLOCK_N, DIM_V>;
using ArrivingK = Boxes<BLOCK_N, DIM, KV_ELEMENT>;
using ArrivingV = Boxes<BLOCK_N, DIM_V, KV_ELEMENT>;

constexpr uint32_t STAGE_BYTES = KBoxes::BYTES + VBoxes::BYTES, ARRIVING_BYTES = ArrivingK::BYTES + ArrivingV::BYTES;
constexpr uint32_t ARRIVING_AT = NARROW ? DEPTH * STAGE_BYTES : 0;
constexpr uint32_t BARRIERS_AT = ARRIVING_AT + STAGES * ARRIVING_BYTES;
constexpr uint32_t ARRIVING_BARRIERS_AT = NARROW ? BARRIERS_AT + 16 * DEPTH : BARRIERS_AT;
constexpr uint32_t FOUND_AT = ARRIVING_BARRIERS_AT + 16 * STAGES;
constexpr uint32_t LAYOUT_BYTES = FOUND_AT + 16;
static_assert(KBoxes::BOX_BYTES % 1024 == 0 && VBoxes::BOX_BYTES % 1024 == 0, "each box starts a swizzle");
static_assert(SHARED_BYTES == LAYOUT_BYTES, "the launch must provide what is laid out here");
static_assert(SHARED_BYTES <= 232448, "a block has at most 227 KiB of shared memory");

struct Shared {
  uint32_t base;

  __device__ __forceinline__ uint32_t k(int stage) const { return base + stage * STAGE_BYTES; }
  __device__ __forceinline__ uint32_t v(int stage) const { return k(stage) + KBoxes::BYTES; }
  __device__ __forceinline__ uint32_t full(int stage) const { return base + BARRIERS_AT + 16 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(stage) + 8; }
  // What TMA brings: the same stages, unless they are widened first.
  __device__ __forceinline__ uint32_t arriving_k(int stage) const { return base + ARRIVING_AT + stage * ARRIVING_BYTES; }
  __device__ __forceinline__ uint32_t arriving_v(int stage) const { return arriving_k(stage) + ArrivingK::BYTES; }
  __device__ __forceinline__ uint32_t arrived(int stage) const { return base + ARRIVING_BARRIERS_AT + 16 * stage; }
  __device__ __forceinline__ uint32_t taken(int stage) const { return arrived(stage) + 8; }

  __device__ __forceinline__ uint32_t found() const { return base + FOUND_AT; }
};
