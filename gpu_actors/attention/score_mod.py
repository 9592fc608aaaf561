"""ScoreMod: a score modification as kernels take it, a generated header and what it reads.

It stands between the scaled product and the softmax. `gpu_actors.graph` writes it; problems and keys carry it, so that
equal modifications share a cubin, whatever their numbers and tensors.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["SCORE_HEADER", "ScoreMod", "ScoreScalar", "ScoreTensor"]

SCORE_HEADER = "common/score_mod.cuh"


class ScoreTensor(NamedTuple):
    """A tensor that is read at (batch, head, row, key). axes: those of "bhrk" that it is not broadcast along.

    blocks: of a list of a block mask, in place of "bhrk"; it has one axis for each: R of blocks of rows, K of keys.
    """

    dtype: str
    axes: str
    blocks: str = ""


class ScoreScalar(NamedTuple):
    """A number that a launch passes by value. dtype: "int32", "float32" or "float64"."""

    dtype: str


@dataclass(frozen=True, slots=True)
class ScoreMod:
    """header: takes the place of kernels_cu/common/score_mod.cuh. tensors, scalars: what a launch passes, in order.

    real: "float" or "double", what scores are computed in. block_size: None, or rows and keys of a block of its block
    mask, whose lists are the last tensors.
    """

    header: str = field(repr=False)
    tensors: tuple[ScoreTensor, ...] = ()
    scalars: tuple[ScoreScalar, ...] = ()
    real: str = "float"
    block_size: tuple[int, int] | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of the header, hexadecimal, which says everything."""
        return hashlib.sha256(self.header.encode()).hexdigest()

    def __str__(self) -> str:
        return self.digest[:16]

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    @staticmethod
    def tensor_name(index: int) -> str:
        """Under which a launch's inputs hold tensor ``index``."""
        return f"score_tensor_{index}"
