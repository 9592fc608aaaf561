"""Runs the kernels' tests with products fused into sums, or without. For tests.

ptxas fuses `a * b - c` if it can; the emulated device does so only on request. Numbers that are right in only one of
these modes could pass here and be wrong on a GPU. Host compilers fuse less than ptxas does: they do not fuse a product
that is also used elsewhere. So the gates check machine code too (gates/exponents.py).

Other properties of the hardware are a mode too: functions with their largest errors, sums that tensor cores cut off.
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
    """While entered, build kernels with products fused into sums, in random blocks of code alone, or not at all."""
    global _fused
    previous, _fused = _fused, fused
    try:
        yield
    finally:
        _fused = previous


@contextmanager
def like_hardware() -> Iterator[None]:
    """While entered, kernels compute with the hardware's errors, unless a launch says otherwise."""
    global _arithmetic
    previous, _arithmetic = _arithmetic, "hardware"
    try:
        yield
    finally:
        _arithmetic = previous


def arithmetic() -> Arithmetic:
    """The arithmetic of launches."""
    return _arithmetic


def toolchain() -> Toolchain:
    """The compiler of emulated kernels, told whether to fuse."""
    if _fused == "random":
        return Toolchain.fusing_at_random(0)
    return dataclasses.replace(_installed(), contraction=_fused)


@functools.cache
def _installed() -> Toolchain:
    return Toolchain.find()
