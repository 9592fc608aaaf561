"""DeviceArray: an array in a CUDA device's memory, described without any array library."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from gpu_actors.arrays.dlpack import contiguous_strides

__all__ = ["AnyArray", "DeviceArray", "Joined", "element_strides"]


class _Shaped(Protocol):
    """Has a shape and a dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...


class _Extents:
    """The properties that follow from a shape and a dtype, with the names of ndarray."""

    __slots__ = ()

    @property
    def ndim(self: _Shaped) -> int:
        return len(self.shape)

    @property
    def size(self: _Shaped) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self: _Shaped) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self: _Shaped) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self: _Shaped) -> int:
        return self.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceArray(_Extents):
    """Where an array lies, in the terms of ndarray, and what keeps its memory alive.

    strides: in bytes. device: index of the CUDA device.
    stream: the stream whose earlier work must finish before the array is used; None: nothing to wait for.
    owner: the object that keeps the memory, and that stream, alive.
    source: the array of another library that this one describes, or None.
    make: returns a new array of a shape and dtype in that library's own memory, for a launch to fill. Raises
        OutOfDeviceMemory. None if the device has to allocate.
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
    def contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        dense = contiguous_strides(self.shape, self.itemsize)
        steps = zip(self.shape, self.strides, dense, strict=True)
        return self.size == 0 or all(extent == 1 or a == b for extent, a, b in steps)

    def packed(self, axis: int = 0) -> DeviceArray:
        """View (batch, rows, ...) as (batch * rows, ...). axis: the batch's.

        Raises ValueError if strides do not allow this view.
        """
        (batch, rows, *shape), (stride, row_stride, *strides) = self.shape[axis:], self.strides[axis:]
        if rows > 1 and batch > 1 and stride != rows * row_stride:
            raise ValueError(f"strides {self.strides}: the rows of a batch do not follow those of the one before")
        step = stride if rows == 1 else row_stride
        before, steps_before = self.shape[:axis], self.strides[:axis]
        return self._view(self.address, (*before, batch * rows, *shape), (*steps_before, step, *strides))

    def transpose(self, *axes: int) -> DeviceArray:
        """Return a view with the axes in another order, reversed if none is given."""
        order = axes or tuple(reversed(range(self.ndim)))
        shape = tuple(self.shape[axis] for axis in order)
        strides = tuple(self.strides[axis] for axis in order)
        return self._view(self.address, shape, strides)

    def __getitem__(self, index: Any) -> DeviceArray:
        """Return a view. index: ints, slices of step 1, None for a new axis, and an ellipsis, as for an ndarray."""
        given = list(index) if isinstance(index, tuple) else [index]
        missing = [slice(None)] * (self.ndim - sum(part is not None and part is not ... for part in given))
        where = given.index(...) if ... in given else len(given)
        address = self.address
        shape: list[int] = []
        strides: list[int] = []
        axes = iter(zip(self.shape, self.strides, strict=True))
        for part in (*given[:where], *missing, *given[where + 1 :]):
            if part is None:
                shape.append(1)
                strides.append(0)
                continue
            extent, stride = next(axes)
            if isinstance(part, slice):
                start, stop, step = part.indices(extent)
                if step != 1:
                    raise ValueError(f"{part}: views of device arrays have step 1")
                address += start * stride
                shape.append(max(0, stop - start))
                strides.append(stride)
            elif -extent <= part < extent:
                address += (part % extent) * stride
            else:
                raise IndexError(f"index {part} is out of range for an axis of {extent}")
        # The other library's array is cut in the same way, so that a part of a result is an array of that library, too.
        source = None if self.source is None else self.source[index]
        return self._view(address, tuple(shape), tuple(strides), source)

    def inserted(self, axis: int) -> DeviceArray:
        """Return a view with an axis of extent 1 inserted before ``axis``."""
        shape, strides = self.shape, self.strides
        return self._view(self.address, (*shape[:axis], 1, *shape[axis:]), (*strides[:axis], 0, *strides[axis:]))

    def _view(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], source: Any = None) -> DeviceArray:
        return DeviceArray(
            address, shape, strides, self.dtype, self.device, self.stream, self.owner, self.writeable, source, self.make
        )

    def view(self, dtype: np.dtype[Any]) -> DeviceArray:
        """The same bits read as another dtype of the same size."""
        if dtype.itemsize != self.itemsize:
            raise ValueError(f"{self.dtype} and {dtype} differ in size")
        return dataclasses.replace(self, dtype=dtype, source=None)


@dataclass(frozen=True, slots=True, eq=False)
class Joined(_Extents):
    """Contiguous device arrays, joined along their first axis. A launch copies them next to each other.

    Only their first extents may differ.
    """

    parts: tuple[DeviceArray, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.parts[0].dtype

    @property
    def strides(self) -> tuple[int, ...]:
        return contiguous_strides(self.shape, self.itemsize)

    def __getitem__(self, index: tuple[Any, ...]) -> Joined:
        """Return a view of every part. index: must begin with the whole first axis."""
        if index[0] != slice(None):
            raise ValueError(f"{index}: a joined array is cut behind its first axis alone")
        return Joined(tuple(part[index] for part in self.parts))

    def view(self, dtype: np.dtype[Any]) -> Joined:
        """The same bits read as another dtype of the same size."""
        return Joined(tuple(part.view(dtype) for part in self.parts))


AnyArray: TypeAlias = np.ndarray[Any, Any] | DeviceArray


def element_strides(array: AnyArray) -> tuple[int, ...]:
    """Strides in elements."""
    itemsize = array.itemsize
    return tuple([stride // itemsize for stride in array.strides])
