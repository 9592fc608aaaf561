"""Runs the kernels' tests with products fused into sums, or without. For tests.

ptxas fuses `a * b - c` where it can; the emulated device does so only if it is told to. Numbers that hold in one of the
two alone would pass here and be wrong on a GPU, or the other way round. Host compilers fuse less than ptxas does: they
leave a product alone that is used elsewhere, too. So machine code is looked at besides (exponents.py).

The hardware's other habits are modes as well: functions that err as far as they may, sums that tensor cores cut off.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from inside.emulation import Toolchain
from inside.package import Arithmetic

__all__ = ["arithmetic", "fused_products", "like_hardware", "toolchain"]

_fused: bool | Literal["random"] = False
_arithmetic: Arithmetic = "nearest"


@contextmanager
def fused_products(fused: bool | Literal["random"] = True) -> Iterator[None]:
    """Build kernels with products fused into sums in the meantime, in some blocks of code alone, or without."""
    global _fused
    previous, _fused = _fused, fused
    try:
        yield
    finally:
        _fused = previous


@contextmanager
def like_hardware() -> Iterator[None]:
    """Let kernels compute with the hardware's errors in the meantime, where a launch does not say otherwise."""
    global _arithmetic
    previous, _arithmetic = _arithmetic, "hardware"
    try:
        yield
    finally:
        _arithmetic = previous


def arithmetic() -> Arithmetic:
    """What launches compute with."""
    return _arithmetic


def toolchain() -> Toolchain:
    """The compiler of emulated kernels, told whether to fuse."""
    if _fused == "random":
        return Toolchain.fusing_at_random(0)
    return dataclasses.replace(_installed(), contraction=_fused)


@functools.cache
def _installed() -> Toolchain:
    return Toolchain.find()
