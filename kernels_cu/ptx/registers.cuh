// Moving registers between warpgroups (sm_90a). Every warp of the warpgroup executes it. Without
// __launch_bounds__(threads, 1) of the kernel, ptxas ignores it (note C7508).
#pragma once

#include "ptx/types.cuh"

namespace ptx {

// The warpgroup keeps COUNT registers a thread (24 to 256, a multiple of 8) and gives the rest away.
template <int COUNT>
WRAPPER void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Waits until the warpgroup can have COUNT registers a thread.
template <int COUNT>
WRAPPER void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

}  // namespace ptx
