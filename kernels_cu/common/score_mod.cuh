// The modification between the scaled product and the rest of the score. Here there is none, and it costs nothing.
//
// For a score modification this file is replaced by one that gpu_actors/graph/cuda.py generates: the same names with
// SCORE_MOD 1, the operands that it reads in ScoreParams, and in ScoreMod also the derivative that backward needs.
#pragma once

#include "common/types.cuh"

#define SCORE_MOD 0
#define BLOCK_MASK 0

struct ScoreParams {};

struct ScoreMod {  // bound to a sequence and a head
  template <class Real>
  __device__ __forceinline__ Real operator()(Real score, int, int) const {
    return score;
  }
  template <class Real>
  __device__ __forceinline__ Real gradient(Real, Real dscore, int, int) const {
    return dscore;
  }
};

DEVICE ScoreMod bind_score_mod(const ScoreParams&, int, int) { return {}; }

// The parameters of a launch: the fixed ones of a kernel.
template <class Params>
struct WithScoreMod : Params {
  __device__ __forceinline__ ScoreParams score_params() const { return {}; }
};
