// Host twins of ptx/registers.cuh: a host thread has the registers it has.
#pragma once

#include "emulation/collective.cuh"

namespace ptx {

template <int COUNT>
DEVICE void setmaxnreg_dec() {
  static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "a multiple of 8 from 24 to 256");
  emulation::gather_warp("setmaxnreg.dec");
}

template <int COUNT>
DEVICE void setmaxnreg_inc() {
  static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "a multiple of 8 from 24 to 256");
  emulation::gather_warp("setmaxnreg.inc");
}

}  // namespace ptx
