// Tensor loads, stores and reductions of every rank: sm_90a. The box passes through shared memory unchanged.
#include "ptx/fence.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"

struct Box {
  int c[5];        // coordinates of the box that is loaded
  int d[5];        // coordinates of the box that is stored
  uint32_t bytes;  // of a box
  int reduce;
};

template <int RANK>
DEVICE void load_box(uint32_t shared, const ptx::TensorMap* map, uint32_t barrier, const int* c) {
  if constexpr (RANK == 1) ptx::tma_load(shared, map, barrier, c[0]);
  if constexpr (RANK == 2) ptx::tma_load(shared, map, barrier, c[0], c[1], ptx::CachePolicy::evict_first);
  if constexpr (RANK == 3) ptx::tma_load(shared, map, barrier, c[0], c[1], c[2]);
  if constexpr (RANK == 4) ptx::tma_load(shared, map, barrier, c[0], c[1], c[2], c[3], ptx::CachePolicy::evict_last);
  if constexpr (RANK == 5) ptx::tma_load(shared, map, barrier, c[0], c[1], c[2], c[3], c[4]);
}
template <int RANK>
DEVICE void store_box(const ptx::TensorMap* map, uint32_t shared, const int* c) {
  if constexpr (RANK == 1) ptx::tma_store(map, shared, c[0]);
  if constexpr (RANK == 2) ptx::tma_store(map, shared, c[0], c[1]);
  if constexpr (RANK == 3) ptx::tma_store(map, shared, c[0], c[1], c[2]);
  if constexpr (RANK == 4) ptx::tma_store(map, shared, c[0], c[1], c[2], c[3]);
  if constexpr (RANK == 5) ptx::tma_store(map, shared, c[0], c[1], c[2], c[3], c[4]);
}
template <int RANK>
DEVICE void add_box(const ptx::TensorMap* map, uint32_t shared, const int* c) {
  if constexpr (RANK == 1) ptx::tma_reduce_add(map, shared, c[0]);
  if constexpr (RANK == 2) ptx::tma_reduce_add(map, shared, c[0], c[1]);
  if constexpr (RANK == 3) ptx::tma_reduce_add(map, shared, c[0], c[1], c[2]);
  if constexpr (RANK == 4) ptx::tma_reduce_add(map, shared, c[0], c[1], c[2], c[3]);
  if constexpr (RANK == 5) ptx::tma_reduce_add(map, shared, c[0], c[1], c[2], c[3], c[4]);
}

// The loaded box also goes out as it lies in shared memory (image).
template <int RANK>
DEVICE void move_box(const ptx::TensorMap& from, const ptx::TensorMap& to, uint32_t* image, const Box& box) {
  DYNAMIC_SHARED(shared);
  const uint32_t data = ptx::shared_address(shared), barrier = data + box.bytes;
  if (threadIdx.x == 0) {
    ptx::tma_prefetch_map(&from);
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(barrier, box.bytes);
    load_box<RANK>(data, &from, barrier, box.c);
  }
  __syncthreads();
  ptx::mbarrier_wait(barrier, 0);
  for (int i = threadIdx.x; i < box.bytes / 4; i += blockDim.x) image[i] = ptx::load_shared(data + 4 * i);
  __syncthreads();
  if (threadIdx.x == 0) {
    if (box.reduce) add_box<RANK>(&to, data, box.d);
    else store_box<RANK>(&to, data, box.d);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
  }
}

extern "C" __global__ void move_1(const __grid_constant__ ptx::TensorMap from,
                                  const __grid_constant__ ptx::TensorMap to, uint32_t* image,
                                  const __grid_constant__ Box box) {
  move_box<1>(from, to, image, box);
}
extern "C" __global__ void move_2(const __grid_constant__ ptx::TensorMap from,
                                  const __grid_constant__ ptx::TensorMap to, uint32_t* image,
                                  const __grid_constant__ Box box) {
  move_box<2>(from, to, image, box);
}
extern "C" __global__ void move_3(const __grid_constant__ ptx::TensorMap from,
                                  const __grid_constant__ ptx::TensorMap to, uint32_t* image,
                                  const __grid_constant__ Box box) {
  move_box<3>(from, to, image, box);
}
extern "C" __global__ void move_4(const __grid_constant__ ptx::TensorMap from,
                                  const __grid_constant__ ptx::TensorMap to, uint32_t* image,
                                  const __grid_constant__ Box box) {
  move_box<4>(from, to, image, box);
}
extern "C" __global__ void move_5(const __grid_constant__ ptx::TensorMap from,
                                  const __grid_constant__ ptx::TensorMap to, uint32_t* image,
                                  const __grid_constant__ Box box) {
  move_box<5>(from, to, image, box);
}
