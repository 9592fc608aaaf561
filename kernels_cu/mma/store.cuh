// Rows of results, from the accumulators of mma.sync to global memory.
#pragma once

#include "common/params.cuh"

// Stores two neighbouring elements of a row, in one store if the row is aligned for it.
template <class Element>
DEVICE void store_pair(Element* out, float low, float high, bool whole) {
  struct alignas(2 * sizeof(Element)) Pair {
    Element low, high;
  };
  const Pair pair{from_real(Rounded<Element>(), low), from_real(Rounded<Element>(), high)};
  if (whole) {
    *reinterpret_cast<Pair*>(out) = pair;
  } else {
    out[0] = pair.low;
    out[1] = pair.high;
  }
}

// Whether pairs at this element and at even distances from it may be stored at once.
template <class Element>
DEVICE bool stores_pairs(const Element* out) {
  return reinterpret_cast<uint64_t>(out) % (2 * sizeof(Element)) == 0;
}
