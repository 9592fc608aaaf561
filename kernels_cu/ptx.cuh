// Every instruction that kernels use beyond CUDA C++: one family a header, one asm statement a function.
#pragma once

#include "ptx/types.cuh"

#include "ptx/atomic.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/convert.cuh"
#include "ptx/copy_async.cuh"
#include "ptx/fence.cuh"
#include "ptx/grid.cuh"
#include "ptx/math.cuh"
#include "ptx/matrix.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/pack.cuh"
#include "ptx/pack_fp8.cuh"
#include "ptx/pin.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "ptx/warp.cuh"
#include "ptx/wgmma.cuh"
