// The gradient of a q, k or v that all sequences of a batch share: the sum of theirs, rounded once.
//
//   parts   sequence 0: element 0, 1, .. size - 1 | sequence 1: .. | ..      as the kernels before left them, unrounded
//   sum     element 0, 1, .. size - 1                                        a thread each
//
// A sum is taken in the order of the sequences, so it has the same bits each time.
#include "common/types.cuh"

LITTLE_ARITHMETIC

#ifndef ELEMENT
#error "ELEMENT must be given"
#endif

constexpr int THREADS = 256;

struct SumParams {
  const void* parts;
  void* sum;
  int64_t size;  // elements of a sequence
  int64_t batch;
};

extern "C" __global__ void __launch_bounds__(THREADS) backward_sum(const __grid_constant__ SumParams params) {
  using Real = Accumulator<ELEMENT>;
  const int64_t place = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (place >= params.size) return;
  const Real* const parts = static_cast<const Real*>(params.parts) + place;
  Real sum = 0;
  for (int64_t n = 0; n < params.batch; n++) sum += parts[n * params.size];
  static_cast<ELEMENT*>(params.sum)[place] = from_real(Rounded<ELEMENT>(), sum);
}
