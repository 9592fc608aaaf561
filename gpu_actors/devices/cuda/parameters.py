"""The parameters of a kernel, laid out in memory as the driver reads them."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

from gpu_actors.devices.interface import Params

__all__ = ["KernelParams", "kernel_params"]

_ALIGNMENT = 64
"""The alignment of a CUtensorMap among the parameters."""


class KernelParams(NamedTuple):
    """The parameters of a launch.

    address: the address of an array of pointers, one to each parameter.
    keepalive: the objects that must live until the driver has copied the parameters.
    """

    address: int
    keepalive: tuple[object, object]


@functools.lru_cache(maxsize=512)
def kernel_params(params: Params) -> KernelParams:
    """Lay out the bytes of a kernel's only parameter, or of each of several parameters.

    The results are cached: launches on the same operands have the same bytes, and nothing writes to the memory.
    """
    parts = (params,) if isinstance(params, bytes) else params
    sizes = [-(-len(part) // _ALIGNMENT) * _ALIGNMENT for part in parts]
    memory = ctypes.create_string_buffer(sum(sizes) + _ALIGNMENT)
    address = ctypes.addressof(memory)
    address += -address % _ALIGNMENT
    pointers = (ctypes.c_void_p * max(1, len(parts)))()
    for place, (part, nbytes) in enumerate(zip(parts, sizes, strict=True)):
        ctypes.memmove(address, part, len(part))
        pointers[place] = address
        address += nbytes
    return KernelParams(ctypes.addressof(pointers), (memory, pointers))
