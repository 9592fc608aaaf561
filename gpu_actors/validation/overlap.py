"""Checks of an output's memory: no element may share it with an input, which is still read, or with another element."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from gpu_actors.errors import InvalidRequest
from gpu_actors.fields import describe

__all__ = ["check_output_memory"]

# The work limit of the search for an element that two strided arrays share; interleaved slices need little.
_MAX_WORK = 10_000


def check_output_memory(out: Any, inputs: dict[str, Any]) -> None:
    """Raise `InvalidRequest` unless ``out`` has an element of its own for every position, none of them an input's.

    out: an ndarray or a `DeviceArray`. inputs: the operands by name, of either kind.
    """
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise InvalidRequest("out", describe(out), "must be writeable")
    if not _lies_apart(out.shape, out.strides, out.itemsize):
        reason = "must have a place of its own for every element: not a broadcast or overlapping view"
        raise InvalidRequest("out", describe(out), reason)
    if isinstance(out, np.ndarray):
        for name, array in inputs.items():
            if isinstance(array, np.ndarray):  # an input on the device lies apart from an out on the host
                _check_host(out, name, array)
        return
    start = out.address
    low, high = _bounds(out.shape, out.strides, out.dtype.itemsize)
    for name, array in inputs.items():
        if isinstance(array, np.ndarray):
            continue
        first, end = _bounds(array.shape, array.strides, array.dtype.itemsize)
        apart = array.address - start
        if low < end + apart and first + apart < high:
            raise InvalidRequest("out", describe(out), f"may share memory with {name}: their address ranges meet")


def _check_host(out: np.ndarray[Any, Any], name: str, array: np.ndarray[Any, Any]) -> None:
    try:
        shared = np.shares_memory(out, array, max_work=_MAX_WORK)  # type: ignore[arg-type]  # the stub knows 0 and -1
    except np.exceptions.TooHardError:
        raise InvalidRequest("out", describe(out), f"may share memory with {name}; give one that lies apart") from None
    if shared:
        raise InvalidRequest("out", describe(out), f"must not share memory with {name}")


@functools.lru_cache(maxsize=1024)
def _lies_apart(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """True if each axis steps over all memory that the shorter steps reach. Then no two elements share memory."""
    if 0 in shape:
        return True  # NumPy gives empty arrays strides of 0
    reach = itemsize
    steps = sorted((abs(stride), extent) for stride, extent in zip(strides, shape, strict=True) if extent > 1)
    for stride, extent in steps:
        if stride < reach:
            return False
        reach = stride * (extent - 1) + reach
    return True


@functools.lru_cache(maxsize=1024)
def _bounds(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """First and past-the-last byte of a `DeviceArray`, counted from element 0."""
    steps = [stride * (extent - 1) for stride, extent in zip(strides, shape, strict=True) if extent]
    low = sum(step for step in steps if step < 0)
    high = sum(step for step in steps if step > 0) + itemsize
    return low, (high if 0 not in shape else low)
