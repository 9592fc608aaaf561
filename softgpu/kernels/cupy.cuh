// What CuPy's elementwise kernels over contiguous arrays take, for a host compiler: the layouts that CuPy passes.
// Kernels that need more of CuPy's headers do not compile here, and the driver says so.
#pragma once

using ptrdiff_t = decltype(static_cast<char*>(nullptr) - static_cast<char*>(nullptr));

#define CUPY_FOR(i, n)                                                                         \
  for (ptrdiff_t i = static_cast<ptrdiff_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < (n); \
       i += static_cast<ptrdiff_t>(blockDim.x) * gridDim.x)

template <class T, int rank, bool contiguous, bool narrow>
struct CArray {
  static_assert(contiguous || rank == 0, "only contiguous arrays are known here");
  T* data;
  ptrdiff_t size;
  ptrdiff_t shape[rank], stride[rank];

  T& operator[](ptrdiff_t i) { return data[i]; }
  const T& operator[](ptrdiff_t i) const { return data[i]; }
};
template <class T, bool contiguous, bool narrow>
struct CArray<T, 0, contiguous, narrow> {
  T* data;
  ptrdiff_t size;

  T& operator[](ptrdiff_t i) { return data[i]; }
  const T& operator[](ptrdiff_t i) const { return data[i]; }
};

template <int rank, bool narrow>
struct CIndexer {
  ptrdiff_t count;
  ptrdiff_t shape[rank], index[rank];

  ptrdiff_t size() const { return count; }
  void set(ptrdiff_t i) { index[0] = i; }
  ptrdiff_t get() const { return index[0]; }
};

// Only the bits, because no kernel known here computes with them.
struct bfloat16 {
  unsigned short bits;
};
