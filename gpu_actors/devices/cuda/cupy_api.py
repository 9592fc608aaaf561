"""CupyApi: `CudaApi` through CuPy. Importing this module imports CuPy."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ParamSpec, TypeVar

import cupy
from cupy.cuda import driver, runtime

from gpu_actors.devices.cuda.api import DeviceProperties, MemoryBlock
from gpu_actors.devices.cuda.errors import NOT_READY, OUT_OF_MEMORY, CudaFailure
from gpu_actors.devices.cuda.library import library, make_primary_context
from gpu_actors.devices.cuda.parameters import kernel_params
from gpu_actors.devices.cuda.tensor_map import encode_tensor_map
from gpu_actors.devices.interface import Buffer, Params, TensorMap

__all__ = ["CupyApi", "CupyBlock"]

P = ParamSpec("P")
R = TypeVar("R")

_CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_CU_STREAM_CAPTURE_MODE_RELAXED = 2


def _exchange_capture_mode(mode: ctypes.c_int) -> None:
    """Set this thread's capture mode to ``mode``, and put its former capture mode into ``mode``."""
    with contextlib.suppress(OSError):
        library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


class _Relaxed:
    """See `CudaApi.relaxed`."""

    def __enter__(self) -> None:
        self._mode = ctypes.c_int(_CU_STREAM_CAPTURE_MODE_RELAXED)
        _exchange_capture_mode(self._mode)

    def __exit__(self, *_: object) -> None:
        _exchange_capture_mode(self._mode)


def _checked(call: Callable[P, R]) -> Callable[P, R]:
    """Turn CuPy's exceptions into `CudaFailure`."""

    @functools.wraps(call)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except (runtime.CUDARuntimeError, driver.CUDADriverError) as error:
            raise CudaFailure(error.status, call.__name__, str(error)) from error
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise CudaFailure(OUT_OF_MEMORY, call.__name__, str(error)) from error

    return checked


class CupyBlock:
    """Memory of a CuPy pool. It returns to the pool when the pointer is dropped."""

    __slots__ = ("address", "pointer")

    def __init__(self, pointer: Any) -> None:
        self.address: int = pointer.ptr
        self.pointer: Any = pointer


class CupyApi:
    """The calls of one device. It has its own pool: the program's allocators are neither used nor changed."""

    emulation: None = None
    lent_after: int | None = runtime.streamLegacy

    def __init__(self, index: int) -> None:
        self._index = index
        self._pool = cupy.cuda.MemoryPool()
        self._lent = cupy.cuda.MemoryPool()

    @_checked
    def bind(self) -> None:
        make_primary_context(self._index)
        runtime.setDevice(self._index)

    def allow_captures(self) -> None:
        _exchange_capture_mode(ctypes.c_int(_CU_STREAM_CAPTURE_MODE_RELAXED))

    def relaxed(self) -> contextlib.AbstractContextManager[None]:
        return _Relaxed()

    @_checked
    def is_current(self) -> bool:
        return bool(runtime.getDevice() == self._index)

    @_checked
    def properties(self) -> DeviceProperties:
        raw = runtime.getDeviceProperties(self._index)
        name = raw["name"].decode(errors="replace").rstrip("\0")
        capability = 10 * raw["major"] + raw["minor"]
        uuid = bytes(raw.get("uuid", b"")).hex()
        driver = str(runtime.driverGetVersion())
        return DeviceProperties(name, capability, raw["totalGlobalMem"], raw["multiProcessorCount"], uuid, driver)

    @_checked
    def allocate(self, nbytes: int) -> MemoryBlock:
        with _Relaxed():  # the pool may ask the driver for memory, and give free blocks back to it before
            return CupyBlock(self._pool.malloc(nbytes))

    @_checked
    def lend(self, nbytes: int) -> MemoryBlock:
        with _Relaxed():
            return CupyBlock(self._lent.malloc(nbytes))

    def free(self, block: MemoryBlock) -> None:
        assert isinstance(block, CupyBlock)
        block.pointer = None

    @_checked
    def trim(self) -> None:
        with _Relaxed(), cupy.cuda.Device(self._index):
            self._pool.free_all_blocks()
            self._lent.free_all_blocks()

    @_checked
    def allocate_pinned(self, nbytes: int) -> int:
        with _Relaxed():
            return int(runtime.hostAlloc(nbytes, runtime.hostAllocPortable))

    @_checked
    def free_pinned(self, address: int) -> None:
        with _Relaxed():
            runtime.freeHost(address)

    @_checked
    def create_stream(self) -> int:
        return int(runtime.streamCreateWithFlags(runtime.streamNonBlocking))

    @_checked
    def destroy_stream(self, stream: int) -> None:
        runtime.streamDestroy(stream)

    @_checked
    def copy_to_device(self, device: int, host: int, nbytes: int, stream: int) -> None:
        runtime.memcpyAsync(device, host, nbytes, runtime.memcpyHostToDevice, stream)

    @_checked
    def copy_to_host(self, host: int, device: int, nbytes: int, stream: int) -> None:
        runtime.memcpyAsync(host, device, nbytes, runtime.memcpyDeviceToHost, stream)

    @_checked
    def copy_on_device(self, device: int, source: int, nbytes: int, stream: int) -> None:
        runtime.memcpyAsync(device, source, nbytes, runtime.memcpyDeviceToDevice, stream)

    @_checked
    def fill(self, device: int, value: int, nbytes: int, stream: int) -> None:
        runtime.memsetAsync(device, value, nbytes, stream)

    @_checked
    def launch_kernel(
        self,
        function: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        stream: int,
        params: Params,
        operands: Mapping[str, Buffer] | None = None,
    ) -> None:
        packed = kernel_params(params)  # the driver copies the parameters before it returns
        driver.launchKernel(function, *grid, *block, shared_bytes, stream, packed.address, 0)

    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        return encode_tensor_map(tensor_map)

    @_checked
    def is_capturing(self, stream: int) -> bool:
        try:
            return bool(runtime.streamIsCapturing(stream))
        except runtime.CUDARuntimeError:
            raise
        except RuntimeError:  # CuPy raises it where an error has invalidated the capture
            return True

    @_checked
    def create_event(self, asked: bool = True) -> int:
        return int(runtime.eventCreateWithFlags(runtime.eventBlockingSync | runtime.eventDisableTiming))

    @_checked
    def destroy_event(self, event: int) -> None:
        runtime.eventDestroy(event)

    @_checked
    def record_event(self, event: int, stream: int) -> None:
        runtime.eventRecord(event, stream)

    @_checked
    def event_done(self, event: int) -> bool:
        with _Relaxed():
            # CuPy returns the status of this call instead of raising it.
            status = runtime.eventQuery(event)
        if status not in (0, NOT_READY):
            runtime.check_status(status)
        return bool(status == 0)

    @_checked
    def synchronize_event(self, event: int) -> None:
        runtime.eventSynchronize(event)

    @_checked
    def wait_event(self, stream: int, event: int) -> None:
        runtime.streamWaitEvent(stream, event)

    @_checked
    def load_module(self, image: Hashable) -> int:
        with _Relaxed():
            return int(driver.moduleLoadData(image))

    @_checked
    def unload_module(self, module: int) -> None:
        with _Relaxed():
            driver.moduleUnload(module)

    @_checked
    def get_function(self, module: int, name: str) -> int:
        return int(driver.moduleGetFunction(module, name))

    @_checked
    def allow_shared_memory(self, function: int, nbytes: int) -> None:
        driver.funcSetAttribute(function, _CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, nbytes)

    def close(self) -> None:
        self.trim()
