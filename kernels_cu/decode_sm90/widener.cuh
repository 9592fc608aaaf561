// The wideners of decode_sm90 over 8-bit caches: a warpgroup that turns tiles as they arrive into tiles of q's type.
//
//     8 bits, STAGES stages --ld.shared--> registers, widened exactly --st.shared--> 16 bits, DEPTH stages --wgmma-->
//
// A lane takes 16 elements of a row. Eight neighbouring lanes have two rows whose numbers differ by an XOR of 5, so
// that neither their loads of 16 bytes nor their stores meet in a bank.
#pragma once

#include "decode/pieces.cuh"
#include "decode_sm90/layout.cuh"

struct Widener {
  Shared shared;
  Ring<STAGES> from{0, 0};
  Ring<DEPTH> to{0, 1};

  __device__ __forceinline__ void widen_tiles(const Piece& piece) {
#pragma unroll 1
    for (int n = piece.first; n < piece.last; n++) {
      ptx::mbarrier_wait(shared.arrived(from.stage), from.parity);
      ptx::mbarrier_wait(shared.empty(to.stage), to.parity);
      widen_tile<ArrivingK, KBoxes>(shared.arriving_k(from.stage), shared.k(to.stage));
      widen_tile<ArrivingV, VBoxes>(shared.arriving_v(from.stage), shared.v(to.stage));
      ptx::fence_proxy_async();
      __syncwarp();
      if (lane_id() == 0) {
        ptx::mbarrier_arrive(shared.full(to.stage));
        ptx::mbarrier_arrive(shared.taken(from.stage));
      }
      from.advance();
      to.advance();
    }
  }

  template <class From, class To>
  __device__ __forceinline__ void widen_tile(uint32_t source, uint32_t target) const {
    constexpr int GROUPS = From::COUNT * From::WIDTH / 64;  // of four lanes, a row
    const int row_of_eight = lane_id() / 8 ^ lane_id() / 4 % 2 * 5;
#pragma unroll 2
    for (int n = int(threadIdx.x) % WARPGROUP / 32; n < BLOCK_N / 8 * GROUPS; n += 4) {
      const int row = n / GROUPS * 8 + row_of_eight, unit = n % GROUPS * 4 + lane_id() % 4;
      uint32_t words[4], wide[4][2], pairs[2][4];
      ptx::load_shared_v4(words, From::place(source, row, unit));
      widen(wide, words);
#pragma unroll
      for (int w = 0; w < 4; w++) {
        pairs[w / 2][w % 2 * 2] = __byte_perm(wide[w][0], wide[w][1], 0x5410);
        pairs[w / 2][w % 2 * 2 + 1] = __byte_perm(wide[w][0], wide[w][1], 0x7632);
      }
      ptx::store_shared_v4(To::place(target, row, 2 * unit), pairs[0]);
      ptx::store_shared_v4(To::place(target, row, 2 * unit + 1), pairs[1]);
    }
  }
};
