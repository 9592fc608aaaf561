// The parameters of a launch of backward_sm90: tensor maps of what TMA loads, and those of every backward kernel.
//
// gpu_actors/kernels/backward_sm90.py packs it.
#pragma once

#include "backward/params.cuh"
#include "common/score_gradient.cuh"
#include "ptx/types.cuh"

struct Sm90BackwardParams {
  ptx::TensorMap q, k, v, dout;  // (dim, rows, heads, batch), with the rows of all sequences together if VARLEN
  WithScoreMod<BackwardParams> params;
};
static_assert(sizeof(ptx::TensorMap) == 128 && alignof(ptx::TensorMap) == 64, "as the driver encodes it");
