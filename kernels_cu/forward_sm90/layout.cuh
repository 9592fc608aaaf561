// Sizes of forward_sm90, and the layout of its shared memory.
//
// Operands lie in the boxes of forward_sm90/boxes.cuh.
//
//     Q of each warpgroup | K, STAGES tiles | V, STAGES tiles | V as it arrives | O of each warpgroup | mbarriers | ..
//                                                               ^ one tile, FP8   ^ not where O_DIRECT
#pragma once

#include "forward_sm90/boxes.cuh"

constexpr int DIM = padded_dim(HEAD_DIM), DIM_V = padded_dim(HEAD_DIM_V);
constexpr int CONSUMERS = WARPS / 4 - 1;  // warpgroups that multiply; the other one loads
constexpr int ROWS = 64;                  // of a consumer
constexpr bool PACKED_KEYS = VARLEN && !CACHE_LENGTHS;
constexpr bool OTHERS_FOLLOW = PACKED_KEYS || CACHE_LENGTHS;  // rows after a sequence's last key are not its own
constexpr int PART = PAGE_SIZE > 0 && PAGE_SIZE < BLOCK_N ? PAGE_SIZE : BLOCK_N;  // keys that one copy brings

static_assert(WARPS % 4 == 0 && (CONSUMERS == 2 || CONSUMERS == 3), "a producer and two or three consumers");
static_assert(BLOCK_M == ROWS * CONSUMERS, "a wgmma has 64 rows, and a consumer multiplies 64 rows at a time");
static_assert(BLOCK_N % STEP == 0 && BLOCK_N <= 256, "keys are N of one product and K of the other");
static_assert(PAGE_SIZE % 8 == 0, "a part of a tile starts where the swizzle does");
static_assert(BLOCK_N % PART == 0 && (PAGE_SIZE == 0 || PAGE_SIZE % PART == 0), "pages and tiles divide each other");
static_assert(PAGE_SIZE == 0 || CACHE_LENGTHS, "pages have no lengths of their own");
static_assert(HEAD_DIM * sizeof(ELEMENT) % 16 == 0 && HEAD_DIM_V * sizeof(ELEMENT) % 16 == 0,
              "TMA takes rows of a multiple of 16 bytes");
static_assert(!FP8 || !CACHE_LENGTHS, "8-bit caches are left to the kernels that decode");

using QBoxes = Boxes<ROWS, DIM>;
using OBoxes = Boxes<ROWS, DIM_V, OUT_ELEMENT>;
using KBoxes = Boxes<BLOCK_N, DIM>;
using ArrivingV = Boxes<BLOCK_N, DIM_V>;

template <bool TRANSPOSED>
struct ValueBoxes {
  using type = ArrivingV;
};
template <>
struct ValueBoxes<true> {
  using type = Boxes<DIM_V, BLOCK_N>;
};
using VBoxes = ValueBoxes<FP8>::type;  // as they are multiplied

constexpr uint32_t K_AT = CONSUMERS * QBoxes::BYTES, V_AT = K_AT + STAGES * KBoxes::BYTES;
constexpr uint32_t ARRIVING_AT = V_AT + STAGES * VBoxes::BYTES, O_AT = ARRIVING_AT + (FP8 ? ArrivingV::BYTES : 0);
constexpr uint32_t BARRIERS_AT = O_AT + (O_DIRECT ? 0 : CONSUMERS * OBoxes::BYTES);

constexpr int SLOTS = 2;  // tile indices on their way from the producer to the consumers
constexpr int NO_VALUES = -1;  // in place of a tile's own keys: no tile of V follows
constexpr int BARRIERS = 2 * CONSUMERS + 4 * STAGES + 2 * SLOTS + 2 * FP8;
constexpr uint32_t TILES_AT = BARRIERS_AT + 8 * BARRIERS, OWN_KEYS_AT = TILES_AT + 8 * SLOTS;

static_assert(K_AT % 1024 == 0 && V_AT % 1024 == 0 && O_AT % 1024 == 0, "where the 128-byte swizzle starts");
static_assert(KBoxes::BOX_BYTES % 1024 == 0 && VBoxes::BOX_BYTES % 1024 == 0, "each box starts a swizzle");
static_assert(ARRIVING_AT % 1024 == 0 && ArrivingV::BOX_BYTES % 1024 == 0, "and so do those of V as it arrives");
constexpr uint32_t LAYOUT_BYTES = OWN_KEYS_AT + 8 * FP8;
static_assert(SHARED_BYTES == LAYOUT_BYTES, "the launch must provide what is laid out here");
static_assert(SHARED_BYTES <= 232448, "a block has at most 227 KiB of shared memory");

// The block's shared memory. Barriers come in pairs: `full` says that something is there, `empty` that its place is
// free.
struct Shared {
  uint32_t base;

  __device__ __forceinline__ uint32_t q(int consumer) const { return base + consumer * QBoxes::BYTES; }
  __device__ __forceinline__ uint32_t k(int stage) const { return base + K_AT + stage * KBoxes::BYTES; }
  __device__ __forceinline__ uint32_t v(int stage) const { return base + V_AT + stage * VBoxes::BYTES; }
  __device__ __forceinline__ uint32_t arriving_v() const { return base + ARRIVING_AT; }
  __device__ __forceinline__ uint32_t own_keys() const { return base + OWN_KEYS_AT; }  // of the tile of V that arrived
  __device__ __forceinline__ uint32_t o(int consumer) const { return base + O_AT + consumer * OBoxes::BYTES; }
  __device__ __forceinline__ uint32_t tile(int slot) const { return base + TILES_AT + 8 * slot; }

  __device__ __forceinline__ uint32_t q_full(int consumer) const { return barrier(consumer); }
  __device__ __forceinline__ uint32_t q_empty(int consumer) const { return barrier(CONSUMERS + consumer); }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return barrier(2 * CONSUMERS + stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return barrier(2 * CONSUMERS + STAGES + stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return barrier(2 * CONSUMERS + 2 * STAGES + stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return barrier(2 * CONSUMERS + 3 * STAGES + stage); }
  __device__ __forceinline__ uint32_t tile_full(int slot) const { return barrier(2 * CONSUMERS + 4 * STAGES + slot); }
  __device__ __forceinline__ uint32_t tile_empty(int slot) const {
    return barrier(2 * CONSUMERS + 4 * STAGES + SLOTS + slot);
  }
  __device__ __forceinline__ uint32_t v_arrived() const { return barrier(2 * CONSUMERS + 4 * STAGES + 2 * SLOTS); }
  __device__ __forceinline__ uint32_t v_taken() const { return barrier(2 * CONSUMERS + 4 * STAGES + 2 * SLOTS + 1); }

 private:
  __device__ __forceinline__ uint32_t barrier(int number) const { return base + BARRIERS_AT + 8 * number; }
};
