// What the last of the backward kernels does besides dQ: it adds up the parts of dsinks and converts the sums of dbias.
#pragma once

#include "backward/params.cuh"

// Called by blocks of THREADS, for the heads blockIdx.x, blockIdx.x + gridDim.x and so on.
template <int THREADS>
DEVICE void finish_sinks(const BackwardParams& params, int tiles) {
  __shared__ float partial[THREADS];
  const Params& forward = params.forward;
  const int count = params.batch * tiles;
  for (int head = blockIdx.x; head < forward.heads_q; head += gridDim.x) {
    const float* const parts = params.dsinks_parts + int64_t(head) * count;
    float sum = 0.0f;
    for (int part = threadIdx.x; part < count; part += THREADS) sum += parts[part];
    partial[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      sum = 0.0f;
      for (int thread = 0; thread < THREADS; thread++) sum += partial[thread];
      if (forward.sinks_are_float) static_cast<float*>(params.dsinks)[head] = sum;
      else static_cast<OUT_ELEMENT*>(params.dsinks)[head] = from_real(Rounded<OUT_ELEMENT>(), sum);
    }
    __syncthreads();  // the sums are read before the next head's are written
  }
}

// Called by blocks of THREADS, which share the work of the grid.
template <int THREADS>
DEVICE void finish_bias(const BackwardParams& params) {
  if constexpr (BIAS && sizeof(BIAS_ELEMENT) < sizeof(float)) {
    BIAS_ELEMENT* const dbias = static_cast<BIAS_ELEMENT*>(params.dbias);
    for (int64_t n = int64_t(blockIdx.x) * THREADS + threadIdx.x; n < params.dbias_size; n += int64_t(gridDim.x) * THREADS) {
      dbias[n] = from_real(Rounded<BIAS_ELEMENT>(), params.dbias_sums[n]);
    }
  }
}
