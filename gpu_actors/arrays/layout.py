"""ArrayLayout: the layout of an argument's array, the same in each of many launches that were checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_actors.arrays.adopt import Adopted, dtype_of
from gpu_actors.arrays.device_array import DeviceArray
from gpu_actors.arrays.dlpack import contiguous_strides
from gpu_actors.arrays.request_arrays import take_in
from gpu_actors.errors import InvalidRequest
from gpu_actors.fields import describe

__all__ = ["ArrayLayout", "contiguous", "read_arrays"]


@dataclass(slots=True, eq=False)
class ArrayLayout:
    """The properties that arrays of a layout share.

    strides: in bytes; 0 along axes of extent 1, and all 0 if there are no elements. exact: those of the last array of
    this layout. place: None on the host; else device index, address modulo m, and m, in bytes.
    """

    kind: type[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    exact: tuple[int, ...]
    place: tuple[int, int, int] | None = None

    @classmethod
    def of(cls, array: Any, alignment: int | None) -> ArrayLayout:
        """The layout of an array. alignment: bytes that decide which kernels read it; None: those of an element."""
        place = None
        if isinstance(array, DeviceArray):
            modulo = alignment or array.itemsize
            place = array.device, array.address % modulo, modulo
        return cls(type(array), array.shape, _strides_of(array), array.dtype, array.strides, place)

    def fits(self, array: Any) -> bool:
        """Whether an adopted array, or a `DeviceArray`, has this layout."""
        if type(array) is not self.kind or array.shape != self.shape or array.dtype != self.dtype:
            return False
        if array.strides != self.exact:
            if _strides_of(array) != self.strides:
                return False
            self.exact = array.strides
        if self.place is None:
            return True
        device, rest, modulo = self.place
        return bool(array.device == device and array.address % modulo == rest)

    def __str__(self) -> str:
        where = "on the host"
        if self.place is not None:
            device, rest, modulo = self.place
            where = f"on cuda:{device} at {rest} modulo {modulo} bytes"
        packed = contiguous_strides(self.shape, self.dtype.itemsize)
        alike = all(
            extent == 1 or step == own for extent, step, own in zip(self.shape, packed, self.strides, strict=True)
        )
        order = "contiguous" if alike or 0 in self.shape else f"with strides of {self.strides} bytes"
        return f"{self.dtype} of shape {self.shape}, {order}, {where}"


def _strides_of(array: Any) -> tuple[int, ...]:
    if 0 in array.shape:
        return (0,) * len(array.shape)
    return tuple([0 if extent == 1 else step for extent, step in zip(array.shape, array.strides, strict=True)])


def read_arrays(
    layouts: Mapping[str, ArrayLayout], arrays: Mapping[str, Any], device: str, owner: str
) -> tuple[dict[str, Any], Adopted | None]:
    """Return arrays by name as this package reads them, and q as adopted if it belongs to another library.

    device: "cpu" or "cuda:N". owner: what takes the arrays, as errors call it, such as "this step".
    """
    read: dict[str, Any] = {}
    template: Adopted | None = None
    for name, array in arrays.items():
        layout = layouts.get(name)
        if layout is None:
            raise InvalidRequest(name, describe(array), f"is not an array of {owner}")
        if type(array) is not layout.kind:
            adopted = take_in(array, name, device)
            array = adopted.array
            if name == "q" and array is not adopted.source:
                template = adopted
        if not layout.fits(array):
            raise InvalidRequest(name, describe(array), f"must be {layout}, as {owner} was planned for")
        read[name] = array
    return read, template


def contiguous(shape: tuple[int, ...], dtype: str, device: int | None) -> Any:
    """Return an array without contents, to plan for. device: the index of a CUDA device, None for the host.

    Its elements must not be read: it has no memory for them, so that even an array that is too large for memory can be
    refused by its name.
    """
    kind = dtype_of(dtype)
    strides = contiguous_strides(shape, kind.itemsize)
    if device is None:
        return np.lib.stride_tricks.as_strided(np.empty(1, kind), shape, strides, writeable=False)
    return DeviceArray(0, shape, strides, kind, device)
