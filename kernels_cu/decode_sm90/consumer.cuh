// A consumer of decode_sm90: a warpgroup that multiplies 64 packed rows with the tiles of keys that they see.
#pragma once

#include "decode_sm90/nonfinite.cuh"
#include "decode_sm90/params.cuh"
#include "decode_sm90/store.cuh"

using Queries = uint32_t[DIM / STEP][4];

struct Consumer {
  const Sm90DecodeParams& all;
  Shared shared;
  int number;
  Ring<DEPTH> ring{0, 0};

  // The outline, which decode_sm90.cu defines.
  __device__ __forceinline__ void attend(const Entry& entry, int kv_head, const Piece& piece, int slot);
  __device__ __forceinline__ void step(Output& o, SoftmaxRow (&softmax)[2], Queries& q, const Rows& rows, const SeenKeys& keys,
                                       int first_key, bool masked);

  // The lane's first packed row of the tile.
  __device__ __forceinline__ int first_row() const {
    return number * ROWS + int(threadIdx.x) % WARPGROUP / 32 * 16 + lane_id() / 4;
  }

  // The rows' queries as A operands, straight from global memory: q[n][half + 2 i] is of columns 16n + 8i + 2t and the next.
  __device__ __forceinline__ void load_queries(Queries& q, const Entry& entry, int kv_head) const {
    const Params& attention = all.params.attention;
    const int ratio = heads_a_group(all.params);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int packed = at_most(entry.packed_end - 1, entry.packed_begin + first_row() + 8 * half);
      const Q_ELEMENT* const row =
          element_of<const Q_ELEMENT>(attention.q, attention.q_strides, entry.sequence,
                                    entry.lengths.q_start + packed / ratio, kv_head * ratio + packed % ratio) +
          lane_column();
      const bool wide = reinterpret_cast<uint64_t>(row) % 4 == 0;
#pragma unroll
      for (int block = 0; block < DIM / 8; block++) {
        uint32_t& word = q[block / 2][half + block % 2 * 2];
        if (block * 8 >= HEAD_DIM) word = 0;
        else if (NARROW_Q) word = widen_pair(row[block * 8].bits | uint32_t(row[block * 8 + 1].bits) << 16);
        else if (wide) word = *reinterpret_cast<const uint32_t*>(row + block * 8);
        else word = row[block * 8].bits | uint32_t(row[block * 8 + 1].bits) << 16;
      }
    }
  }

  // S = Q K^T: Q in registers, all keys of the tile.
  __device__ __forceinline__ void multiply_keys(Scores& s, const Queries& q) const {
    const uint64_t k = KBoxes::rows(shared.k(ring.stage));
#pragma unroll
    for (int n = 0; n < DIM / STEP; n++) {
      ptx::wgmma_rs<BLOCK_N, OPERAND>(s, q[n], k + KBoxes::column_step(n), n > 0);
    }
    ptx::wgmma_commit();
  }

  // O += P V: P in registers, all columns of V.
  __device__ __forceinline__ void multiply_values(Output& o, const Weights& p) const {
    const uint64_t v = VBoxes::columns(shared.v(ring.stage));
#pragma unroll
    for (int n = 0; n < BLOCK_N / STEP; n++) ptx::wgmma_rs<DIM_V, OPERAND, true>(o, p[n], v + VBoxes::row_step(n), true);
    ptx::wgmma_commit();
  }

  // Clears nonfinite values from the tile before any consumer multiplies it.
  __device__ __forceinline__ void clear_tile(const SeenKeys& keys, int first_key) const {
    if (clear_values(shared.v(ring.stage), keys, first_key)) ptx::store_shared(shared.found(), 1);
    ptx::fence_proxy_async();
    sync_consumers();
  }
  __device__ __forceinline__ void sync_consumers() const { ptx::barrier_sync(1, CONSUMER_THREADS); }

  // One arrival a warp.
  __device__ __forceinline__ void release() {
    if (lane_id() == 0) ptx::mbarrier_arrive(shared.empty(ring.stage));
    ring.advance();
  }
};
