"""The purely arithmetic layers of an encoder, and how they are read from model.safetensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpu_actors.model_files import Tensors

__all__ = ["Floats", "LayerNorm", "Linear"]

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
