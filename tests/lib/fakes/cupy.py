"""The part of CuPy that the benchmark uses, over `FakeCuda`: arrays in its memory, its streams, timing events."""

from __future__ import annotations

import contextlib
import importlib.machinery
import math
import types
from typing import Any

import numpy as np
from fakes.cuda import LEGACY, FakeCuda

__all__ = ["fake_cupy"]


class Pointer:
    device_id = 0

    def __init__(self, cuda: FakeCuda, ptr: int) -> None:
        self._cuda, self.ptr = cuda, ptr

    def copy_from_device(self, source: Pointer, nbytes: int) -> None:
        self._cuda.memory.at(self.ptr, nbytes)[:] = self._cuda.memory.at(source.ptr, nbytes)

    def memset(self, value: int, nbytes: int) -> None:
        self._cuda.memory.at(self.ptr, nbytes)[:] = value


class Array:
    """A C-contiguous array. Indices and slices are of the first axis alone."""

    def __init__(self, cuda: FakeCuda, ptr: int, shape: tuple[int, ...], dtype: Any, owner: Any) -> None:
        self.data = Pointer(cuda, ptr)
        self.shape, self.dtype = shape, np.dtype(dtype)
        self._cuda, self._owner = cuda, owner

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[axis + 1 :]) * self.itemsize for axis in range(len(self.shape)))

    def view(self, dtype: Any) -> Array:
        assert np.dtype(dtype).itemsize == self.itemsize
        return Array(self._cuda, self.data.ptr, self.shape, dtype, self._owner)

    def reshape(self, shape: tuple[int, ...]) -> Array:
        assert math.prod(shape) == math.prod(self.shape)
        return Array(self._cuda, self.data.ptr, tuple(shape), self.dtype, self._owner)

    def __getitem__(self, place: int | slice) -> Array:
        step = self.strides[0]
        if isinstance(place, int):
            return Array(self._cuda, self.data.ptr + place * step, self.shape[1:], self.dtype, self._owner)
        start, stop, _ = place.indices(self.shape[0])
        return Array(self._cuda, self.data.ptr + start * step, (stop - start, *self.shape[1:]), self.dtype, self._owner)

    def get(self) -> np.ndarray[Any, Any]:
        return self._cuda.memory.array(self.data.ptr, self.shape, self.dtype).copy()


class Runtime(types.SimpleNamespace):
    """now: milliseconds, moved by matmul and copies."""

    memcpyDeviceToDevice = 3

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__(cuda=cuda, now=0.0, times={}, events=0)

    def eventCreate(self) -> int:
        self.events += 1
        return int(self.events)

    def eventRecord(self, event: int, stream: int) -> None:
        def record() -> None:
            self.times[event] = self.now

        self.cuda.enqueue(stream, record)

    def eventElapsedTime(self, begin: int, end: int) -> float:
        return float(self.times[end] - self.times[begin])

    def eventDestroy(self, event: int) -> None:
        del self.times[event]

    def streamSynchronize(self, stream: int) -> None:
        self.cuda.run_all()

    def deviceSynchronize(self) -> None:
        self.cuda.run_all()

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert kind == self.memcpyDeviceToDevice

        def copy() -> None:
            self.cuda.memory.at(target, nbytes)[:] = self.cuda.memory.at(source, nbytes)
            self.now += 0.5

        self.cuda.enqueue(stream, copy)

    def getDeviceProperties(self, index: int) -> dict[str, Any]:
        named = {"name": b"Fake\0", "major": 8, "minor": 0, "multiProcessorCount": 4, "totalGlobalMem": 1 << 30}
        return {**named, "l2CacheSize": 1 << 12}

    def driverGetVersion(self) -> int:
        return 13000

    def runtimeGetVersion(self) -> int:
        return 13000


def fake_cupy(cuda: FakeCuda) -> tuple[types.ModuleType, types.ModuleType]:
    """The modules cupy and cupy.cuda."""

    def place(array: np.ndarray[Any, Any]) -> Array:
        block = cuda.put(array)
        return Array(cuda, block.address, array.shape, array.dtype, block)

    def matmul(a: Array, b: Array, out: Array) -> None:
        def multiply() -> None:
            runtime.now += 2.0

        cuda.enqueue(current[-1], multiply)

    class Stream:
        device_id = -1

        def __init__(self, ptr: int) -> None:
            self.ptr = ptr

        def __enter__(self) -> None:
            current.append(self.ptr)

        def __exit__(self, *_: object) -> None:
            current.pop()

    current = [LEGACY]
    runtime = Runtime(cuda)
    module, inner = types.ModuleType("cupy"), types.ModuleType("cupy.cuda")
    module.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    pool = types.SimpleNamespace(free_all_blocks=lambda: None)
    vars(inner).update(
        runtime=runtime,
        Device=contextlib.nullcontext,
        ExternalStream=Stream,
        get_current_stream=lambda index: Stream(current[-1]),
        memory=types.SimpleNamespace(OutOfMemoryError=MemoryError),
    )
    vars(module).update(
        cuda=inner,
        ndarray=Array,
        empty=lambda shape, dtype: place(np.zeros(shape, dtype)),
        empty_like=lambda like: place(np.zeros(like.shape, like.dtype)),
        asarray=place,
        asnumpy=lambda array: array.get(),
        matmul=matmul,
        get_default_memory_pool=lambda: pool,
    )
    return module, inner
