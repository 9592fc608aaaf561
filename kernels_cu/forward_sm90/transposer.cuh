// The transposers of forward_sm90 on 8-bit floats: three warps that turn each tile of V as it arrives, rows of keys,
// into columns whose keys lie together, as products of 8 bits need.
//
//     V as it arrives --ldmatrix.trans--> pairs of columns of 16 keys --prmt--> columns --stmatrix--> V as it is multiplied
//
// ldmatrix transposes units of 16 bits: of a matrix of 8 keys and 16 columns thread t of quad g gets columns 2g and 2g + 1
// of keys 2t and 2t + 1. Of two matrices, 16 keys, the bytes of one column make a word, and four such words of a quad are
// 16 positions of that column. There the keys have the order in which a thread has their scores, too: products leave it two
// of every eight, and take four that follow each other.
//
//     scores, keys   0 1 | 2 3 | 4 5 | 6 7 | 8 9 | 10 11 | 12 13 | 14 15        positions    0..3     4..7      ..
//                    t=0   t=1   t=2   t=3   t=0    t=1     t=2     t=3         keys       0 1 8 9  2 3 10 11  ..
//                                                                                            t=0      t=1
//
// Lines of shared memory that lie a multiple of 8 apart meet in the same banks. So stmatrix gets the even columns of a
// pair from the first four quads with the odd ones from the others, and then the rest.
#pragma once

#include "forward_sm90/layout.cuh"

constexpr int TRANSPOSERS = 3;  // warps: those of a warpgroup beside the producer

static_assert(STAGES == 2 || !FP8, "stages and parities are the lowest bits of a tile's number");

struct Transposer {
  Shared shared;
  int number;

  // Transposes every tile of V that the producer brings. One number instead of two rings saves registers.
  __device__ __forceinline__ void run() {
    for (int tile = 0;; tile++) {
      const int stage = tile & 1;
      ptx::mbarrier_wait(shared.v_arrived(), stage);
      const int own_keys = static_cast<int>(ptx::load_shared(shared.own_keys()));
      if (own_keys == NO_VALUES) return;
      if (OTHERS_FOLLOW && own_keys < BLOCK_N) clear_past(own_keys);
      ptx::mbarrier_wait(shared.v_empty(stage), (tile >> 1 & 1) ^ 1);
      transpose(shared.arriving_v(), shared.v(stage));
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane_id() == 0) {
        ptx::mbarrier_arrive(shared.v_full(stage));
        ptx::mbarrier_arrive(shared.v_taken());
      }
    }
  }

  __device__ __forceinline__ void transpose(uint32_t source, uint32_t target) const {
    const int lane = lane_id();
    const int column = lane % 8 * 2 + ((lane / 4 ^ lane / 8) & 1);  // of a unit: its line is what this lane names
    const uint32_t first = lane < 16 ? 0x6420 : 0x7531, second = first ^ 0x1111;
    const uint32_t key_line = ArrivingV::place(source, lane, 0), line = VBoxes::place(target, column, lane / 16);
#pragma unroll 1
    for (int unit = number; unit < DIM_V / 16; unit += TRANSPOSERS) {
      const uint32_t from = ArrivingV::along(key_line, unit), to = line + unit * 16 * VBoxes::LINE;
#pragma unroll
      for (int key = 0; key < BLOCK_N; key += 32) {
        uint32_t pairs[4], words[4];
        ptx::ldmatrix_x4_trans(pairs, from + key * ArrivingV::LINE);
#pragma unroll
        for (int half = 0; half < 4; half += 2) {
          words[half] = __byte_perm(pairs[half], pairs[half + 1], first);
          words[half + 1] = __byte_perm(pairs[half], pairs[half + 1], second);
        }
        ptx::stmatrix_x4(VBoxes::along(to, key / 16), words);
      }
    }
  }

  // After the last key of a packed sequence come values of another one, and 0 * NaN is NaN. Each warp clears the
  // columns that it transposes.
  __device__ __forceinline__ void clear_past(int own_keys) const {
    const uint32_t zeros[4] = {0, 0, 0, 0};
#pragma unroll 1
    for (int unit = number; unit < DIM_V / 16; unit += TRANSPOSERS) {
#pragma unroll 1
      for (int key = own_keys + lane_id(); key < BLOCK_N; key += 32) {
        ptx::store_shared_v4(ArrivingV::place(shared.arriving_v(), key, unit), zeros);
      }
    }
    __syncwarp();
  }
};
