// The first of the backward kernels on Hopper: statistics of rows for backward_sm90 (backward/prepare.cuh).
#include "backward/prepare.cuh"

LITTLE_ARITHMETIC

extern "C" __global__ void __launch_bounds__(PREPARE_THREADS)
    backward_prepare_sm90(const __grid_constant__ BackwardParams params) {
  prepare_rows(params);
}
