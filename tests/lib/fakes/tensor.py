"""Arrays of another library, seen through DLPack alone: DeviceTensor on the fake device, HostTensor on the host."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from fakes.cuda import LEGACY, FakeCuda

__all__ = ["DeviceTensor", "HostTensor"]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class DeviceTensor:
    """Another library's GPU array, as far as DLPack shows it: memory, and a stream that may still write it."""

    CODES = {"float32": (2, 32), "float16": (2, 16), "bfloat16": (4, 16), "int32": (0, 32), "float8_e4m3fn": (10, 8)}

    def __init__(
        self,
        cuda: FakeCuda,
        array: np.ndarray[Any, Any],
        stream: int = LEGACY,
        device: tuple[int, int] = (2, 0),
        steps: tuple[int, ...] | None = None,
        lanes: int = 1,
        offset: int = 0,
    ) -> None:
        self.block = cuda.put(array)
        self.stream = stream
        self.asked: list[int | None] = []
        self._cuda = cuda
        self._device = device
        self._shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        steps = steps or tuple(step // array.itemsize for step in array.strides)
        self._strides = (ctypes.c_int64 * array.ndim)(*steps)
        code, bits = self.CODES[array.dtype.name]
        self._tensor = _DLTensor(
            self.block.address, *device, array.ndim, code, bits, lanes, self._shape, self._strides, offset
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        self.asked.append(stream)
        if stream is not None and stream != self.stream:
            event = self._cuda.create_event()
            self._cuda.record_event(event, self.stream)
            self._cuda.wait_event(stream, event)
            self._cuda.destroy_event(event)
        return _new_capsule(ctypes.addressof(self._tensor), b"dltensor", None)

    def read(self, dtype: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        return self._cuda.memory.array(self.block.address, shape, dtype)


class HostTensor:
    """An array of an unknown library: its ndarray, seen through DLPack alone."""

    def __init__(self, array: np.ndarray[Any, Any], old: bool = False) -> None:
        self.array = array
        self.old = old

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **how: Any) -> Any:
        if self.old and "max_version" in how:
            raise TypeError("unexpected keyword argument 'max_version'")
        return self.array.__dlpack__(**how)
