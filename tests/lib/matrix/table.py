"""The families of the matrix by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from matrix import (
    append,
    backward,
    backward_sm90,
    decode,
    decode_simple,
    decode_sm90,
    forward,
    forward_sm90,
    forward_sm90_fp8,
    forward_wide,
    merge,
)

__all__ = ["FAMILIES", "Family"]


class Family(Protocol):
    """A module of `matrix`, whose docstring explains these attributes."""

    KERNELS: Sequence[str]
    ROWS: Sequence[str]
    RARE: Collection[str]
    GRID: Sequence[str]
    USUAL: Collection[str]

    def run(self, row: str) -> None: ...
    def run_variant(self, variant: str, *, thorough: bool) -> None: ...


FAMILIES: dict[str, Family] = {
    "append": append,
    "backward": backward,
    "backward_sm90": backward_sm90,
    "decode": decode,
    "decode_simple": decode_simple,
    "decode_sm90": decode_sm90,
    "forward": forward,
    "forward_sm90": forward_sm90,
    "forward_sm90_fp8": forward_sm90_fp8,
    "forward_wide": forward_wide,
    "merge": merge,
}
