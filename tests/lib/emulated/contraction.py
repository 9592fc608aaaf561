"""Runs the kernels' tests with products fused into sums, or without. For tests.

ptxas fuses `a * b - c` where it can; the emulated device does so only if it is told to. Numbers that hold in one of the
two alone would pass here and be wrong on a GPU, or the other way round. Host compilers fuse less than ptxas does: they
leave a product alone that is used elsewhere, too. So machine code is looked at besides (exponents.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager

from gpu_actors.devices.emulation import Toolchain

__all__ = ["fused_products", "toolchain"]

_fused = False


@contextmanager
def fused_products(wanted: bool = True) -> Iterator[None]:
    """Build kernels with products fused into sums in the meantime, or without."""
    global _fused
    before, _fused = _fused, wanted
    try:
        yield
    finally:
        _fused = before


def toolchain() -> Toolchain:
    """The compiler of emulated kernels, told whether to fuse."""
    return dataclasses.replace(_found(), contraction=_fused)


@functools.cache
def _found() -> Toolchain:
    return Toolchain.find()
