// stub
#pragma once
#include "emulation/scheduler.cuh"
namespace emulation {
inline bool deliver_one(Block&) { return false; }
inline void check_thread_end(Fiber&) {}
inline void check_block_end(Block&) {}
inline void release_asynchronous_state(Block&) {}
}
