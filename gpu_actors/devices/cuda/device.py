"""CudaDevice: an NVIDIA GPU through CuPy, or an emulated one."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import re
import threading
import time

from gpu_actors.arrays.adopt import CallerNotes, caller_streams
from gpu_actors.arrays.device_array import DeviceArray
from gpu_actors.compiling.source import FIRST_CAPABILITY, Cubin, KernelSource, exact_arch
from gpu_actors.compiling.toolchain import import_cupy
from gpu_actors.devices.cuda.advice import NO_DEVICE, advice, driver_advice
from gpu_actors.devices.cuda.api import CudaApi
from gpu_actors.devices.cuda.driver import Driver
from gpu_actors.devices.cuda.errors import CudaFailure
from gpu_actors.devices.cuda.memory import MemoryPools, leak
from gpu_actors.devices.cuda.module import Modules
from gpu_actors.devices.cuda.probe import Prober
from gpu_actors.devices.cuda.stream import CudaStream
from gpu_actors.devices.interface import Device, DeviceInfo, Kernel, Stream, TensorMap
from gpu_actors.errors import Unsupported
from gpu_actors.extras import cuda_hint
from gpu_actors.options import ContextOptions

__all__ = ["CudaDevice", "attention_obstacle", "cuda_usable"]

logger: logging.Logger = logging.getLogger("gpu_actors")

_CAPABILITY = 75, 76
"""cudaDevAttrComputeCapabilityMajor and -Minor, which CuPy does not name."""

_ENDING, _PAUSE = 5e-2, 1e-3
"""Seconds for which closing a device waits until its last launches have ended, and seconds between two looks."""


def cuda_usable(index: int = 0) -> str | None:
    """Return None if device ``index`` can be used, else a sentence that says why not. Never raises."""
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed: {cuda_hint()}"
    try:
        # This call starts the driver, which may take seconds. Unlike CuPy, ctypes lets other threads run meanwhile.
        ctypes.CDLL("libcuda.so.1").cuInit(0)
    except OSError as error:
        return f"there is no NVIDIA driver ({error}): {driver_advice()}"
    try:
        import_cupy()
        from cupy.cuda import runtime

        count = runtime.getDeviceCount()
    except Exception as error:
        return _advised(f"CUDA does not start: {error}", getattr(error, "status", None))
    if index < count:
        return None
    return _advised(f"there is no cuda:{index}: the driver shows {count} device(s)", None if count else NO_DEVICE)


def _advised(sentence: str, status: int | None) -> str:
    return "; ".join(filter(None, (sentence, advice(status))))


def attention_obstacle(index: int = 0) -> str | None:
    """Return None if device ``index`` can be used and runs this package's kernels, else why not. Never raises.

    A device that is too old for them still compiles and launches kernels of the user's own.
    """
    obstacle = cuda_usable(index)
    if obstacle is not None:
        return obstacle
    from cupy.cuda import runtime

    try:
        major, minor = (runtime.deviceGetAttribute(attribute, index) for attribute in _CAPABILITY)
    except Exception as error:
        return f"CUDA does not say what cuda:{index} is: {error}"
    if 10 * major + minor >= FIRST_CAPABILITY:
        return None
    return f"cuda:{index} has compute capability {major}.{minor}, and the kernels need 8.0 (Ampere) or newer"


class CudaDevice(Device):
    """A GPU with its own memory pool, streams and modules. The program's CuPy and torch are not changed.

    An output without ``into`` is allocated where the launch's first input is: on the host, or on the device by the
    library of that input.

    After a sticky CUDA error every method raises `ContextLost`, and `lost` says why. Only a new process can use the
    device again.

    api: replaces CuPy, for the emulated device and for tests.
    """

    def __init__(self, index: int, options: ContextOptions, api: CudaApi | None = None) -> None:
        if api is None:
            from gpu_actors.devices.cuda.cupy_api import CupyApi

            api = CupyApi(index)
        self.driver: Driver = Driver(api, index)
        self.memory: MemoryPools = MemoryPools(self.driver)
        self._options = options
        self._lock = threading.Lock()
        self._modules = Modules(self.driver)
        self._streams: list[CudaStream] = []
        self._prober: Prober | None = None
        self.driver.enter()
        self.info: DeviceInfo = self._describe() if api.emulation is None else api.emulation.info
        self.builds_kernels: bool = api.emulation is not None

    @property
    def lost(self) -> str | None:
        return self.driver.lost

    def bind_thread(self) -> None:
        self.driver.enter()
        self.driver.api.allow_captures()

    def is_current(self) -> bool:
        try:
            return self.driver.api.is_current()
        except CudaFailure:
            return False  # the actor's thread launches then, and reports the failure

    def note_caller(self) -> CallerNotes | None:
        return caller_streams(self.driver.index)

    @property
    def identity(self) -> tuple[str, ...]:
        properties = self.driver.call(self.driver.api.properties)
        return self.info.kind, properties.name, properties.uuid, properties.driver

    def open_stream(self, name: str) -> Stream:
        self.driver.enter()
        stream = CudaStream(self.memory, name)
        with self._lock:
            self._streams = [other for other in self._streams if other.handle is not None]
            self._streams.append(stream)
        return stream

    def build(self, source: KernelSource, arch: str) -> Kernel:
        emulation = self.driver.api.emulation
        if emulation is None:
            return super().build(source, arch)
        image, parameter_bytes = emulation.build(source)
        entry = source.entry_points[0]
        self.driver.enter()
        return Kernel(entry, self.driver.call(self._modules.function, image, entry), parameter_bytes)

    def load(self, cubin: Cubin, entry: str) -> Kernel:
        self.driver.enter()
        return Kernel(entry, self.driver.call(self._modules.function, cubin.data, entry))

    def allocate(self, shape: tuple[int, ...], dtype: str, zero: bool = False) -> DeviceArray:
        array = self.memory.empty(shape, dtype)
        if zero and array.nbytes:
            self.driver.enter()
            self.driver.call(self._clear, array.address, array.nbytes)
        return array

    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        return self.driver.call(self.driver.api.encode_tensor_map, tensor_map)

    def probe(self) -> None:
        """Fill device memory, copy it back and compare, within ``hang_timeout``."""
        self.driver.enter()
        with self._lock:
            if self._prober is None:
                self._prober = self.driver.call(Prober, self.memory, self._options.clock)
        self._prober.run(self._options.hang_limit(self.info.kind))

    def close(self) -> None:
        with self._lock:
            if self.driver.closed:
                return
            self.driver.closed = True
            streams, self._streams = self._streams, []
        for stream in streams:
            stream.close()
        # Launches on callers' streams get their event as this device's streams close. The event takes a moment.
        latest = time.monotonic() + _ENDING
        while (busy := [stream for stream in streams if not stream.retire()]) and not self.driver.lost:
            if time.monotonic() >= latest:
                break
            time.sleep(_PAUSE)
        hung = self._prober is not None and not self._prober.close()
        if self.driver.lost or busy or hung:
            self._abandon(streams)
            return
        try:
            self._modules.close()
            self.memory.close()
            self.driver.api.close()
        except CudaFailure as failure:
            self.driver.failed(failure)
            self._abandon(streams)

    def _clear(self, address: int, nbytes: int) -> None:
        api = self.driver.api
        # This thread waits, so that no launch on any stream has to wait for another stream.
        stream = api.create_stream()
        event = api.create_event()
        api.fill(address, 0, nbytes, stream)
        api.record_event(event, stream)
        api.synchronize_event(event)
        api.destroy_event(event)
        api.destroy_stream(stream)

    def _describe(self) -> DeviceInfo:
        index, properties = self.driver.index, self.driver.call(self.driver.api.properties)
        native = exact_arch(properties.capability)
        arch = self._options.arch or native
        if not _runs(arch, properties.capability):
            raise Unsupported("arch", arch, f"cuda:{index} is a {properties.name}, which runs {native}", nearest=native)
        return DeviceInfo("cuda", properties.name, arch, index, properties.memory, properties.multiprocessors)

    def _abandon(self, streams: list[CudaStream]) -> None:
        self.driver.abandoned = True
        why = self.driver.lost or "it still works on a launch"
        logger.warning("%s is closed without releasing its memory: %s", self.driver.name, why)
        leak((self.driver.api, self._prober, streams))


def _runs(arch: str, capability: int) -> bool:
    """Whether a device of this compute capability runs cubins of ``arch``."""
    match = re.fullmatch(r"sm_(\d+)([af]?)", arch)
    if match is None:
        return False
    compiled = int(match[1])
    if match[2]:
        return compiled == capability
    return compiled // 10 == capability // 10 and compiled <= capability
