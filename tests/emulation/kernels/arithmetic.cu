// Functions that a GPU approximates, and an addition that flushes subnormals: y[i] = f(x[i]).
#include "ptx.cuh"

DEVICE int place() { return blockIdx.x * blockDim.x + threadIdx.x; }

extern "C" __global__ void ex2(const float* x, float* y) { y[place()] = ptx::ex2(x[place()]); }
extern "C" __global__ void lg2(const float* x, float* y) { y[place()] = ptx::lg2(x[place()]); }
extern "C" __global__ void rcp(const float* x, float* y) { y[place()] = ptx::rcp(x[place()]); }
extern "C" __global__ void exp_(const float* x, float* y) { y[place()] = expf(x[place()]); }
extern "C" __global__ void log_(const float* x, float* y) { y[place()] = logf(x[place()]); }
extern "C" __global__ void tanh_(const float* x, float* y) { y[place()] = tanhf(x[place()]); }
extern "C" __global__ void sinpi(const float* x, float* y) { y[place()] = sinpif(x[place()]); }
extern "C" __global__ void cospi(const float* x, float* y) { y[place()] = cospif(x[place()]); }
extern "C" __global__ void rsqrt_(const float* x, float* y) { y[place()] = rsqrtf(x[place()]); }
extern "C" __global__ void erf_(const float* x, float* y) { y[place()] = erff(x[place()]); }
extern "C" __global__ void fast_exp(const float* x, float* y) { y[place()] = __expf(x[place()]); }
extern "C" __global__ void fast_log(const float* x, float* y) { y[place()] = __logf(x[place()]); }
extern "C" __global__ void fast_log2(const float* x, float* y) { y[place()] = __log2f(x[place()]); }
extern "C" __global__ void fast_third(const float* x, float* y) { y[place()] = __fdividef(x[place()], 3.0f); }
extern "C" __global__ void fast_cos(const float* x, float* y) { y[place()] = __cosf(x[place()]); }
extern "C" __global__ void fast_sin(const float* x, float* y) { y[place()] = __sinf(x[place()]); }
extern "C" __global__ void fast_tanh(const float* x, float* y) { y[place()] = __tanhf(x[place()]); }

extern "C" __global__ void add(const float* x, float* y) { ptx::reduce_add(y + threadIdx.x, x[threadIdx.x]); }
