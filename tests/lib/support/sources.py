"""The sources of kernels."""

from __future__ import annotations

from inside.compiling import Variant
from inside.kernels import variant_of

from gpu_actors import DispatchKey, KernelSource

__all__ = ["kernel_source"]


def kernel_source(key: DispatchKey | Variant) -> KernelSource:
    """What is compiled for a key."""
    return variant_of(key).source
