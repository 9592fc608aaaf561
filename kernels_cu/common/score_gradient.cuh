// From the gradient of a score to that of its dot product, without the scale: the derivative of common/score.cuh.
//
//   dot --scale--> scaled --graph's modification--> modified --softcap--> capped --ALiBi, bias--> score
//                                                                            <-- dscore (also dbias): unchanged --
//                  <-- times the modification's derivative -- times 1 - tanh^2 --
//
// Only the steps left of ALiBi and bias need the dot product again: GRADIENT_NEEDS_DOT.
#pragma once

#include "common/score.cuh"

constexpr bool GRADIENT_NEEDS_DOT = SOFTCAP || SCORE_MOD;

template <class Real>
DEVICE Real score_gradient(const Score<Real>& score, Real dot, Real dscore, int row, int key) {
  const Real scaled = dot * score.scale;
  Real gradient = dscore;
  if constexpr (SOFTCAP) {
    const Real modified = SCORE_MOD ? score.mod(scaled, row, key) : scaled;
    const Real tanh = tanh_of(modified / score.softcap);
    gradient *= Real(1) - tanh * tanh;
  }
  if constexpr (SCORE_MOD) gradient = score.mod.gradient(scaled, gradient, row, key);
  return gradient;
}

// The capped score of a modified one. Multiplies `derivative` by its derivative. With two special functions and no
// branch, to about 1e-7 of the cap: tanh x = 1 - 2r with r = 1 / (1 + e^2x), and 1 - tanh^2 x = 4r (1 - r).
DEVICE float capped_score(const Score<float>& score, float modified, float& derivative) {
  if constexpr (!SOFTCAP) return modified;
  const float r = ptx::rcp(1.0f + ptx::ex2(modified * (2.0f * 1.4426950408889634f / score.softcap)));
  derivative *= 4.0f * r * (1.0f - r);
  return score.softcap - 2.0f * score.softcap * r;
}
