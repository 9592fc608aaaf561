"""EmulatedDevice: runs the project's own .cu kernels on the CPU.

Dispatch, packed parameters and completion are the same as on CUDA. Only the compiler and the processor differ. Every
operand has its own buffer, which ends at an inaccessible page, and outputs begin as NaN, so an access out of bounds
shows.
"""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from gpu_actors.compiling.source import Cubin, KernelSource
from gpu_actors.devices.emulation.build import build_module
from gpu_actors.devices.emulation.memory import POISON, EmulatedBuffer
from gpu_actors.devices.emulation.runtime import EmulatedModule
from gpu_actors.devices.emulation.tensor_map import encode_tensor_map
from gpu_actors.devices.emulation.toolchain import Toolchain
from gpu_actors.devices.host import HostStream
from gpu_actors.devices.interface import (
    Buffer,
    Device,
    DeviceInfo,
    Kernel,
    Launch,
    Outputs,
    Params,
    RecordingStats,
    Stream,
    TensorMap,
)
from gpu_actors.devices.recorded import Recordings, recording_key
from gpu_actors.errors import LaunchError
from gpu_actors.options import ContextOptions, EmulationOptions

__all__ = ["EmulatedDevice"]


class EmulatedDevice(Device):
    """Emulates a GPU of one architecture.

    Raises `GpuActorsError` if the machine has no C++ compiler for the kernels.
    """

    builds_kernels: bool = True

    def __init__(self, arch: str, emulation: EmulationOptions, options: ContextOptions) -> None:
        if emulation.contraction == "random":
            self._toolchain = Toolchain.fusing_at_random(emulation.seed)
        else:
            self._toolchain = replace(Toolchain.find(), contraction=emulation.contraction)
        self.info: DeviceInfo = DeviceInfo("emulated", f"emulated {arch} ({self._toolchain.name})", arch)
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
        entry = source.entry_points[0]
        return Kernel(entry, module, module.parameter_bytes(entry))

    def load(self, cubin: Cubin, entry: str) -> Kernel:
        raise LaunchError("the emulated device runs kernels from their source, and a cubin holds none")

    def allocate(self, shape: tuple[int, ...], dtype: str, zero: bool = False) -> Any:
        kind = numpy_dtype(dtype)
        memory = EmulatedBuffer(math.prod(shape) * kind.itemsize, "allocated")
        if zero:
            memory.array[...] = 0
        return memory.view(kind, shape)

    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        return encode_tensor_map(*tensor_map)

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
        self.recordings: Recordings[_Record] = Recordings()

    def recording_stats(self) -> RecordingStats:
        return self.recordings.stats()

    def run(self, launch: Launch) -> Outputs:
        if not launch.steps and not all(spec.zero for spec in launch.outputs.values()):
            raise LaunchError(f"{self._name}: a launch without a kernel reached the emulated device")
        key = recording_key(launch)
        if key is None:
            operands = _Operands(launch)
            self._run(launch, operands, [step.pack(operands.buffers) for step in launch.steps])
            return operands.results()
        record = self.recordings.acquire(key)
        if record is None:
            operands = _Operands(launch)
            record = _Record(operands, [step.pack(operands.buffers) for step in launch.steps])
        else:
            record.operands.refill(launch)
        self._run(launch, record.operands, record.params)
        outputs = record.operands.results()
        self.recordings.release(key, record)
        return outputs

    def _run(self, launch: Launch, operands: _Operands, params: list[Params]) -> None:
        emulation = self._emulation
        for step, packed in zip(launch.steps, params, strict=True):
            geometry = step.geometry
            if not all(geometry.grid):
                continue
            step.kernel.handle.launch(
                step.kernel.entry,
                geometry.grid,
                geometry.block,
                geometry.shared_bytes,
                packed,
                list(operands.places.values()),
                delivery=emulation.delivery,
                schedule=emulation.schedule,
                arithmetic=emulation.arithmetic,
                seed=emulation.seed,
                threads=emulation.threads,
                limit_seconds=self._hang_timeout,
            )
        for name, scratch in launch.scratch.items():
            if scratch.rearmed and operands.places[name].array.any():
                raise LaunchError(f"{self._name}: the kernels left {name!r} other than 0, as the next launch finds it")


class _Operands:
    """The operands of a launch, each in emulated memory.

    places, buffers: by name.
    """

    def __init__(self, launch: Launch) -> None:
        self.places: dict[str, EmulatedBuffer] = {}
        self.buffers: dict[str, Buffer] = {}
        self._launch = launch
        self._arrays: dict[str, Any] = {}
        for name, array in launch.inputs.items():
            place = EmulatedBuffer.behind(array, name)
            if place is None:
                place = EmulatedBuffer.of(array, name)
                array = place.view(array.dtype, array.shape)
            self._add(name, place, array)
        for name, spec in launch.outputs.items():
            self._make(name, spec.shape, spec.dtype, spec.zero)
        for name, scratch in launch.scratch.items():
            array = self._make(name, scratch.shape, scratch.dtype, scratch.zero)
            if scratch.contents is not None:
                array.reshape(-1).view(np.uint8)[...] = np.frombuffer(scratch.contents(self.buffers), np.uint8)

    def refill(self, launch: Launch) -> None:
        """Copy the operands of a launch of the same shapes to the memory of the last one's."""
        self._launch = launch
        for name, array in launch.inputs.items():
            if not np.may_share_memory(array, self._arrays[name]):
                self._arrays[name][...] = array
        for name, output in launch.outputs.items():
            self.places[name].array[...] = 0 if output.zero else POISON
        for name, scratch in launch.scratch.items():
            if scratch.contents is None:  # otherwise it has addresses, which have not changed
                self.places[name].array[...] = 0 if scratch.zero else POISON

    def results(self) -> Outputs:
        """The outputs, in the callers' arrays if there are any. Inputs that were changed in place are copied back."""
        launch, arrays = self._launch, self._arrays
        for name in (*launch.updates, *launch.returned):
            array = launch.inputs[name]
            if not np.may_share_memory(array, arrays[name]):
                array[...] = arrays[name]
        return {name: _deliver(arrays[name], spec.into) for name, spec in launch.outputs.items()}

    def _make(self, name: str, shape: tuple[int, ...], dtype: str, zero: bool) -> Any:
        kind = numpy_dtype(dtype)
        place = EmulatedBuffer(math.prod(shape) * kind.itemsize, name)
        if zero:
            place.array[...] = 0
        array = place.view(kind, shape)
        self._add(name, place, array)
        return array

    def _add(self, name: str, place: EmulatedBuffer, array: Any) -> None:
        self.places[name] = place
        self._arrays[name] = array
        strides = tuple(stride // array.itemsize for stride in array.strides)
        self.buffers[name] = Buffer(array.ctypes.data, array.shape, strides, array.dtype.name)


class _Record(NamedTuple):
    """A launch that can be replayed.

    params: of its steps, packed with the operands' addresses.
    """

    operands: _Operands
    params: list[Params]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype with this name, which may be one of ml_dtypes."""
    return np.dtype(getattr(ml_dtypes, name, name))


def _deliver(result: Any, into: Any) -> Any:
    # A copy, because the buffer's pages are unmapped with the buffer.
    if into is None:
        return result.copy()
    into[...] = result
    return into
