// NaN and infinities of operands, which products with the zeros of hidden pairs would spread: 0 * NaN is NaN.
//
// A tile with hidden pairs has them set to 0. Keys: once, before the first product; their scores become NaN instead. Q:
// the LSE of its row is NaN. dO: delta of its row is NaN, and the values are added one by one to dV of the keys that
// the row sees. V spreads to no other key.
#pragma once

#include "backward_sm90/scores.cuh"
#include "mma/nonfinite.cuh"

DEVICE bool is_nonfinite(float x) { return x - x != 0.0f; }

// Sets NaN and infinities among 16 bytes to 0, if `clears`. True if there were any.
DEVICE bool clear_unit(uint32_t address, bool clears = true) {
  uint32_t words[4], all = 0;
  ptx::load_shared_v4(words, address);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t nonfinite = nonfinite_bits(ELEMENT(), words[i]);
    words[i] &= ~nonfinite;
    all |= nonfinite;
  }
  if (clears && all != 0) ptx::store_shared_v4(address, words);
  return all != 0;
}

// Clears a tile, by all consumers together.
DEVICE void clear_tile(uint32_t tile, uint32_t bytes) {
#pragma unroll 2
  for (uint32_t at = (fresh_thread() - WARPGROUP) * 16; at < bytes; at += CONSUMERS * WARPGROUP * 16) clear_unit(tile + at);
}

// Sets the thread's two keys aside; the four lanes of a quad share their columns. `key`: the first one's row in the
// tile. Consumers that share keys have all looked before one of them clears.
DEVICE void set_keys_aside(Keys& keys, uint32_t tile, int key) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    bool found = false;
#pragma unroll 1
    for (int unit = lane_id() % 4; unit < DIM / 8; unit += 4) {
      found |= clear_unit(KBoxes::place(tile, key + 8 * half, unit), !SHARED_KEYS);
    }
    const uint32_t lanes = __ballot_sync(ALL_LANES, found) >> lane_id() / 4 * 4 & 15;
    if (lanes != 0) keys.factor[half] = NAN;
  }
  if constexpr (SHARED_KEYS) {
    sync_consumers();
    clear_tile(tile, KBoxes::BYTES);
  }
}

// Whether a delta of the tile says that dO may hold one. The same in all lanes.
DEVICE bool finds_nonfinite(uint32_t deltas) {
  bool found = false;
#pragma unroll 1
  for (int row = fresh_thread() % 32; row < BLOCK_M; row += 32) found |= is_nonfinite(ptx::load_shared_f32(deltas + row * 4));
  return __any_sync(ALL_LANES, found);
}

// Adds the nonfinite values of dO, which the product left out, to dV of the keys that their rows see.
DEVICE void add_nonfinite(float (&dv)[OWN_COLUMNS_V / 2], const BackwardParams& params, const Work& work, const Keys& keys,
                          const Step& step, int first_column) {
  const int first = step.tile * BLOCK_M, column = first_column + fresh_thread() % 4 * 2;
  const Params& forward = params.forward;
  const uint32_t sequence_head = uint32_t(work.at.sequence * forward.heads_q + step.head);
  const Dropout dropout{forward.dropout_seed, forward.dropout_threshold, sequence_head};
  Keys drawn = keys;
  if constexpr (FEWEST_REGISTERS) {  // so that nothing of the draws is computed ahead
    uint32_t key[1] = {uint32_t(keys.key)};
    ptx::pin_registers(key);
    drawn.key = int(key[0]);
  }
#pragma unroll 1
  for (int row = first; row < at_most(work.at.seqlen_q, first + BLOCK_M); row++) {
    const bool seen[2] = {work.mask.visible(row, keys.of(0)), work.mask.visible(row, keys.of(1))};
    float weight[2] = {1.0f, 1.0f};  // only matters as zero or positive
#pragma unroll
    for (int half = 0; half < 2 && DROPOUT; half++) weight[half] = dropout.keeps(row, drawn.of(half)) ? 1.0f : 0.0f;
    const auto values = element_of<const ELEMENT>(params.dout, params.dout_strides, work.at.sequence,
                                                  work.at.q_start + row, step.head) + column;
#pragma unroll
    for (int i = 0; i < OWN_COLUMNS_V / 4; i++) {
      if (first_column + i / 2 * 8 >= HEAD_DIM_V) break;
      float value[1] = {to_real(values[i / 2 * 8 + i % 2])};
      ptx::pin_registers(value);  // one after another: registers are few, and this is rare
      if (!is_nonfinite(value[0])) continue;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (seen[half]) dv[i / 2 * 4 + 2 * half + i % 2] += value[0] * weight[half];
      }
    }
  }
}
