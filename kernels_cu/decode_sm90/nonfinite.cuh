// Infinities and NaN among the values of tiles that not all rows see whole; mma/nonfinite.cuh has their treatment. TMA
// brings whole parts of pages, so they may also be of keys that no row sees.
#pragma once

#include "decode/source.cuh"
#include "decode_sm90/softmax.cuh"
#include "mma/nonfinite.cuh"

// Called by all consumers, which share the tile's units of 16 bytes. True if this thread found a nonfinite value that some
// row sees.
DEVICE bool clear_values(uint32_t tile, const SeenKeys& keys, int first_key) {
  constexpr int UNITS = DIM_V / 8;
  bool found = false;
#pragma unroll 2
  for (int n = threadIdx.x; n < BLOCK_N * UNITS; n += CONSUMER_THREADS) {
    const uint32_t address = VBoxes::place(tile, n / UNITS, n % UNITS);
    uint32_t words[4], all = 0;
    ptx::load_shared_v4(words, address);
#pragma unroll
    for (int w = 0; w < 4; w++) {
      const uint32_t nonfinite = nonfinite_bits(ELEMENT(), words[w]);
      words[w] &= ~nonfinite;
      all |= nonfinite;
    }
    if (all != 0) ptx::store_shared_v4(address, words);
    found |= all != 0 && keys.has(first_key + n / UNITS);
  }
  return found;
}

// Adds the nonfinite values of a tile, which the product left out, to the rows that see them.
DEVICE void add_nonfinite(Output& o, const CacheSource& source, const SeenKeys& keys, const Rows& rows, int first_key) {
#pragma unroll 1
  for (int key = first_key; key < first_key + BLOCK_N; key++) {
    if (!keys.has(key)) continue;
    const bool seen[2] = {rows.visible(0, key), rows.visible(1, key)};
    const KV_ELEMENT* const values = source.value(key) + lane_column();
#pragma unroll
    for (int i = 0; i < DIM_V / 4; i++) {
      if (i / 2 * 8 >= HEAD_DIM_V) break;
      float value[1] = {to_real(values[column_at(i)])};
      ptx::pin_registers(value);  // one after another: registers are few, and this is rare
      if (value[0] - value[0] == 0.0f) continue;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        if (seen[half]) o[register_at(half, i)] += value[0];
      }
    }
  }
}
