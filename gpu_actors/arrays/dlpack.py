"""Reads DLPack capsules, in which any array library describes its memory. The library's package is not needed.

NumPy's own reader refuses bfloat16 and fp8, and CuPy's refuses fp8, so the C structs of the protocol are read here
(dlpack.h 1.1, ``DLManagedTensor`` and ``DLManagedTensorVersioned``). The capsule itself keeps the memory alive: it is
never marked as consumed, so its destructor releases the memory when the last reference to it is dropped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["DLPackError", "DLTensor", "contiguous_strides", "host_view", "read_capsule"]

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
"""The values of DLDeviceType that this package can handle."""

_INT, _UINT, _FLOAT, _BFLOAT, _BOOL, _E4M3FN, _E5M2 = 0, 1, 2, 4, 6, 10, 12
_DTYPES: dict[tuple[int, int], np.dtype[Any]] = {
    **{(_INT, 8 * size): np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    **{(_UINT, 8 * size): np.dtype(f"u{size}") for size in (1, 2, 4, 8)},
    **{(_FLOAT, 8 * size): np.dtype(f"f{size}") for size in (2, 4, 8)},
    (_BOOL, 8): np.dtype(bool),
    (_BFLOAT, 16): np.dtype(ml_dtypes.bfloat16),
    (_E4M3FN, 8): np.dtype(ml_dtypes.float8_e4m3fn),
    (_E5M2, 8): np.dtype(ml_dtypes.float8_e5m2),
}


class DLPackError(Exception):
    """A capsule that cannot be read, with a sentence that says why."""


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


_READ_ONLY = 1
_PLAIN_NAME, _VERSIONED_NAME = b"dltensor", b"dltensor_versioned"
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


@dataclass(frozen=True, slots=True)
class DLTensor:
    """The contents of a capsule. strides: in bytes. device: (DLDeviceType, index). capsule: keeps the memory alive."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    device: tuple[int, int]
    writeable: bool
    capsule: Any


def read_capsule(capsule: Any) -> DLTensor:
    """Read a capsule that is not consumed yet. Raises DLPackError for another object or an unknown dtype."""
    writeable = True
    if _is_valid(capsule, _PLAIN_NAME):
        tensor = _Tensor.from_address(_get_pointer(capsule, _PLAIN_NAME))
    elif _is_valid(capsule, _VERSIONED_NAME):
        managed = _Versioned.from_address(_get_pointer(capsule, _VERSIONED_NAME))
        if managed.major != 1:
            raise DLPackError(f"DLPack version {managed.major}.{managed.minor} is not known: give 1.x")
        tensor = managed.tensor
        writeable = not managed.flags & _READ_ONLY
    else:
        raise DLPackError("__dlpack__ gave no unconsumed capsule")
    kind = tensor.dtype
    dtype = _DTYPES.get((kind.code, kind.bits)) if kind.lanes == 1 else None
    if dtype is None:
        raise DLPackError(f"DLPack dtype (code {kind.code}, {kind.bits} bits, {kind.lanes} lanes) is not known")
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    if tensor.strides:
        strides = tuple(tensor.strides[axis] * dtype.itemsize for axis in range(tensor.ndim))
    else:
        strides = contiguous_strides(shape, dtype.itemsize)
    address = (tensor.data or 0) + tensor.byte_offset
    device = (tensor.device.type, tensor.device.id)
    return DLTensor(address, shape, strides, dtype, device, writeable, capsule)


def contiguous_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The row-major strides in bytes; with an itemsize of 1, in elements."""
    strides: list[int] = []
    step = itemsize
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def host_view(tensor: DLTensor) -> np.ndarray[Any, Any]:
    """Return an ndarray over the tensor's host memory, without a copy. It keeps the capsule alive."""
    if 0 in tensor.shape:
        return np.empty(tensor.shape, tensor.dtype)
    reach = [(extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.strides, strict=True)]
    first = sum(min(step, 0) for step in reach)
    last = sum(max(step, 0) for step in reach) + tensor.dtype.itemsize
    memory = (ctypes.c_char * (last - first)).from_address(tensor.address + first)
    memory.capsule = tensor.capsule  # type: ignore[attr-defined]
    view: np.ndarray[Any, Any]
    view = np.ndarray(tensor.shape, tensor.dtype, memoryview(memory), -first, tensor.strides)
    view.flags.writeable = tensor.writeable
    return view
