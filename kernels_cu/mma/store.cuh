// Rows of results, from the accumulators of mma.sync to global memory.
#pragma once

#include "common/params.cuh"

// Two neighbouring elements of a row, in one store where the row's place allows it.
DEVICE void store_pair(OUT_ELEMENT* out, float low, float high, bool whole) {
  struct alignas(2 * sizeof(OUT_ELEMENT)) Pair {
    OUT_ELEMENT low, high;
  };
  const Pair pair{from_real(Rounded<OUT_ELEMENT>(), low), from_real(Rounded<OUT_ELEMENT>(), high)};
  if (whole) {
    *reinterpret_cast<Pair*>(out) = pair;
  } else {
    out[0] = pair.low;
    out[1] = pair.high;
  }
}

// Whether pairs at this element and at even distances from it may be stored at once.
DEVICE bool stores_pairs(const OUT_ELEMENT* out) {
  return reinterpret_cast<uint64_t>(out) % (2 * sizeof(OUT_ELEMENT)) == 0;
}
