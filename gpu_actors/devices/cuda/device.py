"""CudaDevice: an NVIDIA GPU, through CuPy."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import math
import re
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from gpu_actors.devices.cuda.api import CudaApi, MemoryBlock
from gpu_actors.devices.cuda.errors import OUT_OF_MEMORY, CudaFailure, explain
from gpu_actors.devices.cuda.memory import DeviceMemory, StagingBlock, StagingPool, keep_for_ever
from gpu_actors.devices.cuda.module import Modules
from gpu_actors.devices.cuda.probe import Prober
from gpu_actors.devices.cuda.stream import CudaStream
from gpu_actors.devices.interface import Device, DeviceInfo, Kernel, Stream, TensorMap
from gpu_actors.errors import (
    ActorStopped,
    ContextLost,
    GpuActorsError,
    OutOfDeviceMemory,
    Unsupported,
)
from gpu_actors.interop.arrays import CallerStreams, caller_streams, dtype_of
from gpu_actors.interop.device_array import DeviceArray
from gpu_actors.interop.dlpack import contiguous_strides
from gpu_actors.kernels.source import Cubin, exact_arch
from gpu_actors.options import ContextOptions

__all__ = ["CudaDevice", "cuda_usable"]

logger = logging.getLogger("gpu_actors")

P = ParamSpec("P")
R = TypeVar("R")


def cuda_usable(index: int = 0) -> str | None:
    """None if device ``index`` can be used, else why not, in a sentence. Never raises."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed (pip install 'gpu-actors[cuda13]')"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"there is no NVIDIA driver ({error})"
    try:
        from cupy.cuda import runtime

        count = runtime.getDeviceCount()
    except Exception as error:
        return f"CUDA does not start: {error}"
    return None if index < count else f"there is no cuda:{index}: the driver shows {count} device(s)"


class CudaDevice(Device):
    """A GPU with a memory pool, streams and modules of its own; the program's CuPy and torch are left as they are.

    Outputs without ``into`` lie where the launch's first input lies: on the host, or on the device in the memory of the
    library that the input comes from.

    After a CUDA error that outlives its call, every method raises `ContextLost`, and `lost` says why. In-process there
    is no way back from there; a new process is.

    api: for tests, what to call instead of CuPy.
    """

    def __init__(self, index: int, options: ContextOptions, api: CudaApi | None = None) -> None:
        if api is None:
            from gpu_actors.devices.cuda.cupy_api import CupyApi

            api = CupyApi(index)
        self.api = api
        self.clock = options.clock
        self.lost: str | None = None
        self.closed = False
        self._index = index
        self._options = options
        self._threads = threading.local()
        self._lock = threading.Lock()
        self._staging = StagingPool(api)
        self._modules = Modules(self)
        self._streams: list[CudaStream] = []
        self._abandoned = False
        self._prober: Prober | None = None
        self.enter()
        self.info = self._describe()

    # Device

    def bind_thread(self) -> None:
        self.enter()

    def note_caller(self) -> CallerStreams | None:
        return caller_streams(self._index)

    def open_stream(self, name: str) -> Stream:
        self.enter()
        stream = CudaStream(self, name)
        with self._lock:
            self._streams = [other for other in self._streams if other.handle is not None]
            self._streams.append(stream)
        return stream

    def load(self, cubin: Cubin, entry: str) -> Kernel:
        self.enter()
        return Kernel(entry, self.call(self._modules.function, cubin.data, entry))

    def allocate(self, shape: tuple[int, ...], dtype: str, zero: bool = False) -> DeviceArray:
        array = self.empty(shape, dtype)
        if zero and array.nbytes:
            self.enter()
            self.call(self._clear, array.address, array.nbytes)
        return array

    def empty(self, shape: tuple[int, ...], dtype: str) -> DeviceArray:
        """An array on this device with whatever was in its memory. Freed when it is dropped.

        For launches only: its memory is used again as soon as it is dropped, so work that others enqueued on it must
        be over by then. Raises OutOfDeviceMemory.
        """
        kind = dtype_of(dtype)
        nbytes = math.prod(shape) * kind.itemsize
        memory = DeviceMemory(self, nbytes) if nbytes else None
        address = memory.address if memory is not None else 0
        strides = contiguous_strides(shape, kind.itemsize)
        return DeviceArray(address, tuple(shape), strides, kind, self._index, owner=memory)

    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        return self.call(self.api.encode_tensor_map, tensor_map)

    def probe(self) -> None:
        """Fill device memory, copy it back and look at it, within ``hang_timeout``."""
        self.enter()
        with self._lock:
            if self._prober is None:
                self._prober = self.call(Prober, self)
        self._prober.run(self._options.hang_limit("cuda"))

    def close(self) -> None:
        with self._lock:
            if self.closed:
                return
            self.closed = True
            streams, self._streams = self._streams, []
        for stream in streams:
            stream.close()
        busy = [stream for stream in streams if not stream.retire()]
        hung = self._prober is not None and not self._prober.close()
        if self.lost or busy or hung:
            self._abandon(streams)
            return
        try:
            self._modules.close()
            self._staging.close()
            self.api.close()
        except CudaFailure as failure:
            self.failed(failure)
            self._abandon(streams)

    # For its parts

    def enter(self) -> None:
        """Begin a call on this thread. Raises ContextLost and ActorStopped."""
        if self.lost is not None:
            raise ContextLost(self.lost)
        if self.closed:
            raise ActorStopped(f"cuda:{self._index} is closed")
        if not getattr(self._threads, "bound", False):
            self.call(self.api.bind)
            self._threads.bound = True

    def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call, and turn a CudaFailure into the error that requests are answered with."""
        try:
            return function(*args, **kwargs)
        except CudaFailure as failure:
            raise self.failed(failure) from failure

    def failed(self, failure: CudaFailure) -> GpuActorsError:
        """What to raise for a failure. A sticky one is the end of the device."""
        error = explain(failure)
        if isinstance(error, ContextLost):
            self.lose(str(error))
        return error

    def lose(self, why: str) -> None:
        if self.lost is None:
            logger.error("cuda:%d: %s", self._index, why)
            self.lost = why

    def take_block(self, nbytes: int) -> MemoryBlock:
        """Device memory. Raises OutOfDeviceMemory once the pool's unused blocks did not help either."""
        return self._spare(self.api.allocate, nbytes, "device memory")

    def free(self, block: MemoryBlock) -> None:
        """Give a block back, from any thread. Its work must be over."""
        if self._abandoned or self.lost:
            keep_for_ever(block)
        else:
            self.api.free(block)

    def take_staging(self, nbytes: int) -> StagingBlock:
        return self._spare(self._staging.take, nbytes, "page-locked host memory")

    def give_staging(self, block: StagingBlock) -> None:
        if not (self._abandoned or self.lost):
            self.call(self._staging.give, block)

    def destroy_event(self, event: int) -> None:
        if not (self._abandoned or self.lost):
            self.call(self.api.destroy_event, event)

    def _spare(self, take: Callable[[int], R], nbytes: int, what: str) -> R:
        try:
            return take(nbytes)
        except CudaFailure as failure:
            if failure.status != OUT_OF_MEMORY:
                raise self.failed(failure) from failure
        self.call(self.api.trim)
        self.call(self._staging.trim)
        try:
            return take(nbytes)
        except CudaFailure as failure:
            if failure.status != OUT_OF_MEMORY:
                raise self.failed(failure) from failure
            message = f"cuda:{self._index} has no {what} left for {nbytes} bytes: {failure.detail}"
            raise OutOfDeviceMemory(message) from failure

    def _clear(self, address: int, nbytes: int) -> None:
        # Waits, so that launches on whatever stream find it cleared without waiting for another one each time.
        stream = self.api.create_stream()
        event = self.api.create_event()
        self.api.fill(address, 0, nbytes, stream)
        self.api.record_event(event, stream)
        self.api.synchronize_event(event)
        self.api.destroy_event(event)
        self.api.destroy_stream(stream)

    def _describe(self) -> DeviceInfo:
        found = self.call(self.api.properties)
        own = exact_arch(found.capability)
        arch = self._options.arch or own
        if not _runs(arch, found.capability):
            raise Unsupported("arch", arch, f"cuda:{self._index} is a {found.name}, which runs {own}", nearest=own)
        return DeviceInfo("cuda", found.name, arch, self._index, found.memory, found.multiprocessors)

    def _abandon(self, streams: list[CudaStream]) -> None:
        self._abandoned = True
        why = self.lost or "it still works on a launch"
        logger.warning("cuda:%d is closed without releasing its memory: %s", self._index, why)
        keep_for_ever((self.api, self._prober, streams))


def _runs(arch: str, capability: int) -> bool:
    """Whether a device of this compute capability runs cubins of ``arch``."""
    match = re.fullmatch(r"sm_(\d+)([af]?)", arch)
    if match is None:
        return False
    compiled = int(match[1])
    if match[2]:
        return compiled == capability
    return compiled // 10 == capability // 10 and compiled <= capability
