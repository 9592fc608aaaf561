// Sizes of backward_sm90, and the layout of its shared memory. Operands lie in the boxes of forward_sm90/boxes.cuh.
//
//     K | V | Q, STAGES tiles | dO, tiles | dS, two tiles | dQ | lse, delta of each tile of Q, dO | mbarriers | number
//                                           [query][key]   in the order of accumulators
//
// dK and dV leave through the places of K and V. If SHARED_KEYS, P and dS have a tile each, and dQ has no place.
#pragma once

#include "common/score_gradient.cuh"
#include "forward_sm90/boxes.cuh"
#include "forward_sm90/format.cuh"
#include "mma/softmax.cuh"

// Registers of a consumer hold dK and dV of 64 keys and 128 columns of each. For wider heads both consumers share the
// block's 64 keys: each has half of a tile's queries in S, dP and dQ, and half of the columns in dV and dK.
constexpr bool SHARED_KEYS = BLOCK_N == 64;
constexpr int CONSUMERS = WARPS / 4 - 1;  // warpgroups that multiply; the other one loads, and sends dQ away
constexpr int KEYS = 64;                  // of a consumer
constexpr int QUERIES = SHARED_KEYS ? BLOCK_M / CONSUMERS : BLOCK_M;  // of a consumer's scores

// Both head dims are compiled for 64 or 128, by the tile, or if keys are shared for 192, 192 and 128, or 256. TMA fills
// the extra columns with zeros. Tiles of 128 queries leave registers only for heads of 64 without options.
constexpr int WIDEST = HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V;
constexpr int DIM = SHARED_KEYS ? (WIDEST <= 192 ? 192 : 256) : BLOCK_M == 128 ? 64 : 128;
constexpr int DIM_V = DIM == 192 && HEAD_DIM_V <= 128 ? 128 : DIM;
constexpr int OWN_COLUMNS = SHARED_KEYS ? DIM / CONSUMERS : DIM;  // of a consumer's dK, and of its dV
constexpr int OWN_COLUMNS_V = SHARED_KEYS ? DIM_V / CONSUMERS : DIM_V;
constexpr int DO_STAGES = SHARED_KEYS ? 1 : STAGES;  // tiles of dO
constexpr bool HIDES = CAUSAL || WINDOW || VARLEN;  // pairs of loaded rows and keys, but for keys past the end

using KBoxes = Boxes<BLOCK_N, DIM>;
using VBoxes = Boxes<BLOCK_N, DIM_V>;
using QBoxes = Boxes<BLOCK_M, DIM, ELEMENT, OWN_COLUMNS>;
using DoBoxes = Boxes<BLOCK_M, DIM_V, ELEMENT, OWN_COLUMNS_V>;
using DsBoxes = Boxes<BLOCK_M, BLOCK_N>;

// A consumer multiplies 64 rows of dQ: its own rows and all columns, or all rows and its own columns. Registers hold
// DQ_PIECE of the columns at a time.
constexpr bool OWN_ROWS = BLOCK_M == 64 * CONSUMERS;
constexpr int DQ_COLUMNS = OWN_ROWS ? DIM : DIM / CONSUMERS;
constexpr bool WITH_OPTIONS = !SCALE_ONLY || DROPOUT;
constexpr int DQ_PIECE = SHARED_KEYS && WITH_OPTIONS ? 64 : DQ_COLUMNS > 192 ? 128 : DQ_COLUMNS;
constexpr int DQ_PIECES = DQ_COLUMNS / DQ_PIECE;
constexpr uint32_t DQ_BYTES = 64 * DQ_COLUMNS * 4;  // of a consumer

// Parts of dQ that are added in order wait in shared memory while the consumers go on, and options leave no registers
// for addresses. Others are added from registers: once instead of twice through the memory that products read.
//
// dbias is the gradient before any derivative. If there is a derivative, each thread keeps its products in dQ's place,
// and weights are computed twice, because registers do not suffice for both.
constexpr bool KEEPS_PRODUCTS = BIAS_GRADIENT && GRADIENT_NEEDS_DOT;
constexpr bool SENDS_DQ = (DETERMINISTIC || WITH_OPTIONS) && !SHARED_KEYS && !KEEPS_PRODUCTS;
static_assert(!KEEPS_PRODUCTS || (!SHARED_KEYS && BLOCK_M * KEYS * 4 <= DQ_BYTES), "products have room in dQ's place");
static_assert(!ALIBI_SIGNED, "backward_mma has these gradients");
static_assert(sizeof(ELEMENT) == 2 && sizeof(KV_ELEMENT) == 2 && sizeof(OUT_ELEMENT) == 2, "products are of 16 bits");
static_assert(WARPS == 12 && (SHARED_KEYS || BLOCK_N == KEYS * CONSUMERS), "two consumers of 64 keys, beside a producer");
static_assert(!SHARED_KEYS || QUERIES == 64, "a consumer's queries are the rows of a product of dQ");
static_assert(HEAD_DIM <= DIM && HEAD_DIM_V <= DIM_V, "registers hold dK and dV of so many columns");
static_assert(OWN_ROWS || BLOCK_M == 64, "a product of dQ has 64 rows");
static_assert(DQ_PIECE % KBoxes::WIDTH == 0, "the columns of K in a product are whole boxes");
static_assert(DsBoxes::WIDTH == KEYS, "a consumer's dS fills a box");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM_V % 8 == 0, "TMA takes rows of a multiple of 16 bytes");
static_assert(DQ_FLOATS == CONSUMERS * DQ_BYTES / 4, "the scratch of a slot is what a block adds");

constexpr uint32_t K_AT = 0, V_AT = K_AT + KBoxes::BYTES, Q_AT = V_AT + VBoxes::BYTES;
constexpr uint32_t DO_AT = Q_AT + STAGES * QBoxes::BYTES, DS_AT = DO_AT + DO_STAGES * DoBoxes::BYTES;
constexpr uint32_t DQ_AT = DS_AT + 2 * DsBoxes::BYTES, STATISTICS_AT = DQ_AT + (SHARED_KEYS ? 0 : CONSUMERS * DQ_BYTES);
constexpr uint32_t ROW_BYTES = BLOCK_M * 4;  // of lse or delta
constexpr uint32_t BARRIERS_AT = STATISTICS_AT + (STAGES + DO_STAGES) * ROW_BYTES;
constexpr int BARRIERS = 2 + 2 * STAGES + 2 * DO_STAGES;
constexpr uint32_t NUMBER_AT = BARRIERS_AT + 8 * BARRIERS;  // of the block
constexpr uint32_t LAYOUT_BYTES = NUMBER_AT + 8;
static_assert(V_AT % 1024 == 0 && Q_AT % 1024 == 0 && DO_AT % 1024 == 0 && DS_AT % 1024 == 0, "boxes start a swizzle");
static_assert(QBoxes::BOX_BYTES % 1024 == 0 && DsBoxes::BOX_BYTES % 1024 == 0, "each box starts a swizzle");
static_assert(SHARED_BYTES == LAYOUT_BYTES, "the launch must provide what is laid out here");
static_assert(SHARED_BYTES <= 232448, "a block has at most 227 KiB of shared memory");

// The block's shared memory. Barriers come in pairs: `full` says that something is there, `empty` that its place is
// free.
struct Shared {
  uint32_t base;

  __device__ __forceinline__ uint32_t k() const { return base + K_AT; }
  __device__ __forceinline__ uint32_t v() const { return base + V_AT; }
  __device__ __forceinline__ uint32_t q(int stage) const { return base + Q_AT + stage * QBoxes::BYTES; }
  __device__ __forceinline__ uint32_t dout(int stage) const { return base + DO_AT + stage * DoBoxes::BYTES; }
  __device__ __forceinline__ uint32_t ds(int half) const { return base + DS_AT + half * DsBoxes::BYTES; }
  // If SHARED_KEYS: P, beside one tile of dS.
  __device__ __forceinline__ uint32_t p() const { return ds(1); }
  __device__ __forceinline__ uint32_t dq(int consumer) const { return base + DQ_AT + consumer * DQ_BYTES; }
  __device__ __forceinline__ uint32_t lse(int stage) const { return base + STATISTICS_AT + stage * ROW_BYTES; }
  __device__ __forceinline__ uint32_t delta(int stage) const { return lse(STAGES + stage); }

  __device__ __forceinline__ uint32_t number() const { return base + NUMBER_AT; }

  __device__ __forceinline__ uint32_t keys_full() const { return barrier(0); }
  __device__ __forceinline__ uint32_t keys_empty() const { return barrier(1); }
  __device__ __forceinline__ uint32_t q_full(int stage) const { return barrier(2 + stage); }
  __device__ __forceinline__ uint32_t q_empty(int stage) const { return barrier(2 + STAGES + stage); }
  __device__ __forceinline__ uint32_t dout_full(int stage) const { return barrier(2 + 2 * STAGES + stage); }
  __device__ __forceinline__ uint32_t dout_empty(int stage) const {
    return barrier(2 + 2 * STAGES + DO_STAGES + stage);
  }

 private:
  __device__ __forceinline__ uint32_t barrier(int number) const { return base + BARRIERS_AT + 8 * number; }
};

// Named barriers (0 is __syncthreads): of all consumers, of a consumer and the warp that sends its dQ, of a consumer.
constexpr int ALL_CONSUMERS = 1;
DEVICE void sync_consumers() { ptx::barrier_sync(ALL_CONSUMERS, CONSUMERS * WARPGROUP); }
DEVICE int dq_full(int consumer) { return 2 + consumer; }
DEVICE int dq_empty(int consumer) { return 2 + CONSUMERS + consumer; }
DEVICE void sync_consumer(int consumer) { ptx::barrier_sync(2 + consumer, WARPGROUP); }  // if nothing is sent
constexpr int SENDING = WARPGROUP + 32;  // threads of dq_full and dq_empty
