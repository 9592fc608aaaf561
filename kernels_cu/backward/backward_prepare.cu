// The first of the backward kernels: statistics of rows for backward_mma (backward/prepare.cuh).
#include "backward/prepare.cuh"

LITTLE_ARITHMETIC

extern "C" __global__ void __launch_bounds__(PREPARE_THREADS)
    backward_prepare(const __grid_constant__ BackwardParams params) {
  prepare_rows(params);
}
