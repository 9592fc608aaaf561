// Programmatic dependent launch (sm_90): the next kernel of a stream may start before this one has ended.
#pragma once

#include "ptx/types.cuh"

namespace ptx {

// Waits until the kernels that this launch depends on have ended and their writes are visible.
WRAPPER void griddepcontrol_wait() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Lets the next kernel be scheduled; its griddepcontrol_wait still waits for the end of this one.
WRAPPER void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace ptx
