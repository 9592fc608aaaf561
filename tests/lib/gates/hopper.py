"""Shared by the gates of the three kernels that multiply with wgmma."""

from __future__ import annotations

from typing import NamedTuple

from gates.rows import dims_of

__all__ = ["ARCH", "REGISTERS", "SHARED_BYTES_A_CLOCK", "SHARED_LIMIT", "WgmmaVariant"]

ARCH = "sm_90a"
SHARED_LIMIT = 232_448
SHARED_BYTES_A_CLOCK = 128
REGISTERS = {8: 255, 12: 168, 16: 128}  # by warps: a thread's share of 65,536 at launch, in steps of 8, at most 255


class WgmmaVariant(NamedTuple):
    """A variant of forward_sm90 or backward_sm90."""

    dtype: str
    dim: int
    dim_v: int
    option: str

    @property
    def arch(self) -> str:
        return ARCH

    def __str__(self) -> str:
        return f"{self.dtype} {dims_of(self.dim, self.dim_v)} {self.option}"
