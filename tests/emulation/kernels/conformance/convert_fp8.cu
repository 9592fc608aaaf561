// Floats packed to 8-bit floats (sm_89): one thread a word.
#include "ptx/pack_fp8.cuh"

extern "C" __global__ void narrow_e4m3(const float* in, uint32_t* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = ptx::pack_e4m3(in[4 * i], in[4 * i + 1], in[4 * i + 2], in[4 * i + 3]);
}
