// Host twins of ptx/warp.cuh.
#pragma once

#include "emulation/collective.cuh"

namespace ptx {

DEVICE bool elect_one() {
  emulation::gather_warp("elect.sync");
  return emulation::self().lane == 0;
}

}  // namespace ptx
