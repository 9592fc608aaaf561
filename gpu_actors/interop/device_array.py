"""DeviceArray: an array in a CUDA device's memory, described without any array library."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from gpu_actors.interop.dlpack import contiguous_strides

__all__ = ["AnyArray", "DeviceArray", "element_strides"]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceArray:
    """Where an array lies, in the vocabulary of ndarray, and what keeps it there.

    strides: in bytes. device: index of the CUDA device.
    stream: the stream whose work so far must be over before the array is touched; None: nothing to wait for.
    owner: whatever keeps the memory, and that stream, alive.
    source: the array of another library that this one describes, where there is one.
    make: gives a new array of a shape and dtype in that library's own memory, for a launch to fill. Raises
        OutOfDeviceMemory. None where the device has to allocate.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    device: int
    stream: int | None = None
    owner: Any = None
    writeable: bool = True
    source: Any = None
    make: Callable[[tuple[int, ...], str], DeviceArray] | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def contiguous(self) -> bool:
        """True where the elements lie in row-major order without gaps."""
        dense = contiguous_strides(self.shape, self.itemsize)
        steps = zip(self.shape, self.strides, dense, strict=True)
        return self.size == 0 or all(extent == 1 or a == b for extent, a, b in steps)

    def transpose(self, *axes: int) -> DeviceArray:
        """The same memory with its axes in another order, reversed where none is given."""
        order = axes or tuple(reversed(range(self.ndim)))
        shape = tuple(self.shape[axis] for axis in order)
        strides = tuple(self.strides[axis] for axis in order)
        return dataclasses.replace(self, shape=shape, strides=strides, source=None)

    def view(self, dtype: np.dtype[Any]) -> DeviceArray:
        """The same bits read as another dtype of the same size."""
        if dtype.itemsize != self.itemsize:
            raise ValueError(f"{self.dtype} and {dtype} differ in size")
        return dataclasses.replace(self, dtype=dtype, source=None)


AnyArray: TypeAlias = np.ndarray[Any, Any] | DeviceArray


def element_strides(array: AnyArray) -> tuple[int, ...]:
    """Strides in elements."""
    itemsize = array.itemsize
    return tuple([stride // itemsize for stride in array.strides])
