"""EmulatedDevice: runs the project's own .cu kernels on the CPU.

The same dispatch, the same packed parameters and the same completion path as on CUDA; only the compiler and the place
where the code runs differ. Every operand lies in a buffer of its own that ends at an inaccessible page, and outputs
begin as NaN, so a kernel that reads or writes where it must not is found out.
"""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np

from gpu_actors.devices.emulation.build import build_module
from gpu_actors.devices.emulation.memory import EmulatedBuffer
from gpu_actors.devices.emulation.runtime import EmulatedModule
from gpu_actors.devices.emulation.toolchain import Toolchain
from gpu_actors.devices.host import HostStream
from gpu_actors.devices.interface import Buffer, Device, DeviceInfo, Kernel, Launch, Outputs, Stream
from gpu_actors.errors import LaunchError
from gpu_actors.kernels.source import Cubin, KernelSource
from gpu_actors.options import ContextOptions, EmulationOptions

__all__ = ["EmulatedDevice"]


class EmulatedDevice(Device):
    """Emulates a GPU of the architecture given.

    Raises `GpuActorsError` where the machine has no C++ compiler to build the kernels with.
    """

    builds_kernels = True

    def __init__(self, arch: str, emulation: EmulationOptions, options: ContextOptions) -> None:
        self._toolchain = Toolchain.find()
        self.info = DeviceInfo("emulated", f"emulated {arch} ({self._toolchain.name})", arch)
        self._emulation = emulation
        self._hang_timeout = options.hang_limit("emulated")
        self._cache_dir = None if options.cache_path is None else options.cache_path / "emulated"
        self._streams: list[Stream] = []
        self._modules: dict[KernelSource, EmulatedModule] = {}
        self._lock = threading.Lock()

    def open_stream(self, name: str) -> Stream:
        stream = _EmulatedStream(name, self._emulation, self._hang_timeout)
        self._streams.append(stream)
        return stream

    def build(self, source: KernelSource, arch: str) -> Kernel:
        module = build_module(
            source.source,
            {name: str(value) for name, value in source.macros.items()},
            source.headers,
            self._toolchain,
            self._cache_dir,
            entries=source.entry_points,
            name=source.name,
        )
        return Kernel(source.entry_points[0], module)

    def load(self, cubin: Cubin, entry: str) -> Kernel:
        raise LaunchError("the emulated device runs kernels from their source, and a cubin holds none")

    def probe(self) -> None:
        return

    def close(self) -> None:
        for stream in self._streams:
            stream.close()


class _EmulatedStream(HostStream):
    def __init__(self, name: str, emulation: EmulationOptions, hang_timeout: float) -> None:
        super().__init__(name)
        self._emulation = emulation
        self._hang_timeout = hang_timeout

    def run(self, launch: Launch) -> Outputs:
        kernel, geometry, pack = launch.kernel, launch.geometry, launch.pack
        if kernel is None or geometry is None or pack is None:
            raise LaunchError(f"{self._name}: a launch without a kernel reached the emulated device")
        places = {name: EmulatedBuffer.of(array, name) for name, array in launch.inputs.items()}
        buffers = {name: _buffer(places[name], array) for name, array in launch.inputs.items()}
        outputs: dict[str, Any] = {}
        for name, spec in launch.outputs.items():
            dtype = numpy_dtype(spec.dtype)
            places[name] = EmulatedBuffer(int(np.prod(spec.shape)) * dtype.itemsize, name)
            outputs[name] = places[name].view(dtype, spec.shape)
            buffers[name] = _buffer(places[name], outputs[name])
        if all(geometry.grid):
            emulation = self._emulation
            kernel.handle.launch(
                kernel.entry,
                geometry.grid,
                geometry.block,
                geometry.shared_bytes,
                pack(buffers),
                list(places.values()),
                delivery=emulation.delivery,
                schedule=emulation.schedule,
                seed=emulation.seed,
                threads=emulation.threads,
                limit_seconds=self._hang_timeout,
            )
        return {name: _deliver(outputs[name], spec.into) for name, spec in launch.outputs.items()}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of that name, ml_dtypes' included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def _buffer(place: EmulatedBuffer, array: Any) -> Buffer:
    # The copy is in C order, whatever the strides of the original.
    strides: list[int] = []
    step = 1
    for extent in reversed(array.shape):
        strides.append(step)
        step *= extent
    return Buffer(place.address, array.shape, tuple(reversed(strides)), array.dtype.name)


def _deliver(result: Any, into: Any) -> Any:
    # A copy, because the buffer's pages go with the buffer.
    if into is None:
        return result.copy()
    into[...] = result
    return into
