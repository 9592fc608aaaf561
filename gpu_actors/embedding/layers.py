"""The purely arithmetic layers of an encoder, and how they are read from model.safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpu_actors.errors import InvalidRequest

__all__ = ["Floats", "LayerNorm", "Linear", "TensorReader"]

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b. weight: (out, in), bias: (out,)."""

    weight: Floats
    bias: Floats

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

    def inplace(self, x: Floats) -> Floats:
        x -= x.mean(axis=-1, keepdims=True)
        variance = np.einsum("td,td->t", x, x) / np.float32(x.shape[-1])
        x *= (1.0 / np.sqrt(variance + np.float32(self.eps)))[:, None]
        x *= self.weight
        x += self.bias
        return x


@dataclass(frozen=True, slots=True)
class TensorReader:
    """Reads the tensors of a folder's model.safetensors. Raises `InvalidRequest` for a missing or wrong one."""

    tensors: Mapping[str, Floats]
    folder: Path

    def take(self, name: str, shape: tuple[int | None, ...]) -> Floats:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise InvalidRequest("model", str(self.folder), f"model.safetensors lacks the tensor {name}")
        if len(tensor.shape) != len(shape) or any(w not in (None, g) for w, g in zip(shape, tensor.shape, strict=True)):
            reason = f"the tensor {name} has shape {tensor.shape} where config.json asks for {shape}"
            raise InvalidRequest("model", str(self.folder), reason)
        return tensor

    def linear(self, name: str, out: int, into: int, *, bias: bool = True) -> Linear:
        added = self.take(f"{name}.bias", (out,)) if bias else np.zeros(out, np.float32)
        return Linear(self.take(f"{name}.weight", (out, into)), added)

    def norm(self, name: str, size: int, eps: float) -> LayerNorm:
        return LayerNorm(self.take(f"{name}.weight", (size,)), self.take(f"{name}.bias", (size,)), eps)
