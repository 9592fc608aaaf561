"""The purely arithmetic layers of an encoder, and how they are read from model.safetensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_actors.model_files import Tensors

__all__ = ["Floats", "LayerNorm", "Linear", "gelu_inplace"]

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b. weight: (out, in), bias: (out,)."""

    weight: Floats
    bias: Floats

    @classmethod
    def read(cls, tensors: Tensors, name: str, out: int, into: int, *, bias: bool = True) -> Linear:
        added = tensors.take(f"{name}.bias", (out,)) if bias else np.zeros(out, np.float32)
        return cls(tensors.take(f"{name}.weight", (out, into)), added)

    def __call__(self, x: Floats) -> Floats:
        y: Floats = x @ self.weight.T
        y += self.bias
        return y


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Layer normalisation over the last axis, in place (Ba, Kiros and Hinton 2016)."""

    weight: Floats
    bias: Floats
    eps: float

    @classmethod
    def read(cls, tensors: Tensors, name: str, size: int, eps: float) -> LayerNorm:
        return cls(tensors.take(f"{name}.weight", (size,)), tensors.take(f"{name}.bias", (size,)), eps)

    def inplace(self, x: Floats) -> Floats:
        x -= x.mean(axis=-1, keepdims=True)
        variance = np.einsum("td,td->t", x, x) / np.float32(x.shape[-1])
        x *= (1.0 / np.sqrt(variance + np.float32(self.eps)))[:, None]
        x *= self.weight
        x += self.bias
        return x


# GELU. NumPy has no erf. With a = |x| and Q(a) = erfc(a / sqrt 2) / 2, the upper tail of the normal distribution, this
# form cancels nowhere:
#
#     gelu(x) = x * Phi(x) = max(x, 0) - a * Q(a)
#
# Q(a) has the form of Hastings (Approximations for Digital Computers, 1955; Abramowitz and Stegun 7.1.26),
#
#     Q(a) = exp(-a*a / 2) * t * (c0 + c1 t + ... + c5 t^5),     t = 1 / (1 + 0.28 a),
#
# with coefficients refitted to the error of a * Q(a), 3.4e-9 in exact arithmetic. In float32 the result is off by at
# most 8e-8, and by the half unit in its last place that the final subtraction rounds.
KNEE = np.float32(0.28)
COEFFICIENTS = tuple(
    np.float32(c) for c in (0.1171089860, 0.0637915729, 0.2781820302, -0.2485175060, 0.3969896868, -0.1075548085)
)
BLOCK = 1 << 16
"""Elements of a block: five float32 blocks of this size fit into a 2 MB cache."""


def gelu_inplace(x: Floats) -> Floats:
    """Replace each element of the contiguous, finite array ``x`` (any shape) by its GELU, and return ``x``."""
    flat = x.reshape(-1)
    scratch = np.empty((3, min(BLOCK, flat.size)), np.float32)
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK]
        _gelu_block(block, *scratch[:, : block.size])
    return x


def _gelu_block(x: Floats, a: Floats, t: Floats, tail: Floats) -> None:
    np.abs(x, out=a)
    np.multiply(a, KNEE, out=t)
    t += np.float32(1)
    np.reciprocal(t, out=t)
    np.multiply(t, COEFFICIENTS[-1], out=tail)
    for coefficient in COEFFICIENTS[-2::-1]:
        tail += coefficient
        tail *= t
    tail *= a
    np.multiply(a, a, out=t)
    t *= np.float32(-0.5)
    np.exp(t, out=t)
    tail *= t
    np.maximum(x, np.float32(0), out=x)
    x -= tail
