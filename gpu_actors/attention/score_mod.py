"""ScoreMod: a score modification as kernels take it: a generated header, and the tensors and numbers that it reads.

It modifies the scaled scores before the softmax. `gpu_actors.graph` generates it. Problems and dispatch keys contain
it, so equal modifications share a cubin, even with different numbers and tensors.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["SCORE_HEADER", "ScoreMod", "ScoreScalar", "ScoreTensor"]

SCORE_HEADER = "common/score_mod.cuh"


class ScoreTensor(NamedTuple):
    """A tensor that is read at (batch, head, row, key). axes: the axes of "bhrk" along which it is not broadcast.

    blocks: for a list of a block mask, its axes, which replace "bhrk": R counts blocks of rows, K blocks of keys.
    """

    dtype: str
    axes: str
    blocks: str = ""


class ScoreScalar(NamedTuple):
    """A number that a launch passes by value. dtype: "int32", "float32" or "float64"."""

    dtype: str


@dataclass(frozen=True, slots=True)
class ScoreMod:
    """A score modification as kernels take it.

    header: replaces kernels_cu/common/score_mod.cuh. tensors, scalars: the operands that a launch passes, in order.
    real: "float" or "double", the type in which scores are computed. block_size: None, or rows and keys of a block of
    the block mask, whose lists are the last tensors.
    """

    header: str = field(repr=False)
    tensors: tuple[ScoreTensor, ...] = ()
    scalars: tuple[ScoreScalar, ...] = ()
    real: str = "float"
    block_size: tuple[int, int] | None = None

    @property
    def digest(self) -> str:
        """The hexadecimal SHA-256 of the header, which determines the modification."""
        return hashlib.sha256(self.header.encode()).hexdigest()

    def __str__(self) -> str:
        return self.digest[:16]

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    @staticmethod
    def tensor_name(index: int) -> str:
        """The name of tensor ``index`` among a launch's inputs."""
        return f"score_tensor_{index}"
