// Host twins of ptx/barrier.cuh.
#pragma once

#include "emulation/collective.cuh"

namespace ptx {

DEVICE void barrier_sync(int id, int threads) { emulation::arrive_at_barrier(id, threads, true); }
DEVICE void barrier_arrive(int id, int threads) { emulation::arrive_at_barrier(id, threads, false); }

}  // namespace ptx
