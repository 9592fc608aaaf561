// The parameters of a launch of decode_sm90: tensor maps of the cache, and those of every decode kernel.
//
// gpu_actors/kernels/decode_sm90.py packs it.
#pragma once

#include "decode/params.cuh"
#include "ptx/types.cuh"

struct Sm90DecodeParams {
  ptx::TensorMap k, v;  // (dim, rows, heads, pages or sequences)
  DecodeParams params;
};
static_assert(sizeof(ptx::TensorMap) == 128 && alignof(ptx::TensorMap) == 64, "as the driver encodes it");
