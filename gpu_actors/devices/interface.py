"""What every device offers: buffers in, one launch, an event out.

A `Launch` describes its work in three ways: by its `DispatchKey`, as kernels with packed arguments, and as an oracle
over host arrays. CUDA and the emulated device run the kernels, the mock device runs the oracle, and no code above this
module depends on which.

    Device.open_stream() -> Stream.launch(Launch) -> Event.wait() -> Event.outputs
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from gpu_actors.errors import LaunchError

if TYPE_CHECKING:
    from gpu_actors.attention.problem import DispatchKey
    from gpu_actors.compiling.source import Cubin, KernelSource

__all__ = [
    "Buffer",
    "Device",
    "DeviceInfo",
    "Event",
    "Kernel",
    "Launch",
    "LaunchGeometry",
    "OutputSpec",
    "Pack",
    "Params",
    "RecordingStats",
    "ScratchSpec",
    "Step",
    "StepPack",
    "Stream",
    "TensorMap",
    "zero_launch",
]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a context runs on. memory: bytes in all, None where the notion does not apply."""

    kind: str
    name: str
    arch: str
    index: int = 0
    memory: int | None = None
    multiprocessors: int | None = None
    runs_kernels: bool = True

    @property
    def device_name(self) -> str:
        """Where operands may lie besides the host: "cpu" or "cuda:N"."""
        return f"cuda:{self.index}" if self.kind == "cuda" else "cpu"


class LaunchGeometry(NamedTuple):
    """A grid of blocks of threads, with the dynamic shared memory of a block in bytes."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int


class Buffer(NamedTuple):
    """Where an operand lies on the device. strides are in elements of the dtype named."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class TensorMap(NamedTuple):
    """An operand as the tensor memory accelerator (TMA) sees it.

    address: of element 0. shape: elements, innermost first. strides: bytes of every axis but the innermost. box:
    elements that one copy moves of each axis. swizzle: how 16-byte units are permuted in shared memory.
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: Literal["none", "32B", "64B", "128B"]


class OutputSpec(NamedTuple):
    """An output to produce. into: the caller's array to fill, else a fresh one is made.

    zero: clear it before the first step, for kernels that add to it.
    """

    shape: tuple[int, ...]
    dtype: str
    into: Any = None
    zero: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loaded entry point. handle: whatever the device's loader returned.

    parameter_bytes: how large each parameter is, where a device that builds kernels was asked to find out.
    """

    entry: str
    handle: Any
    parameter_bytes: tuple[int, ...] | None = None


Outputs = Mapping[str, Any]
Pack: TypeAlias = Callable[[Mapping[str, Buffer]], bytes]
"""Turns the buffers of a launch's operands, by name, into the bytes of a kernel's parameter struct."""


Params: TypeAlias = bytes | tuple[bytes, ...]
"""The bytes of a kernel's only parameter, or of each of them."""
StepPack: TypeAlias = Callable[[Mapping[str, Buffer]], Params]


class Step(NamedTuple):
    """One kernel of a launch: the loaded kernel, its grid, and what packs its parameters."""

    kernel: Kernel
    geometry: LaunchGeometry
    pack: StepPack


class ScratchSpec(NamedTuple):
    """Device memory that a launch uses between its steps.

    zero: clear it before the first step. contents: gives its bytes from the buffers of inputs and outputs, which is how
    a kernel gets a table of addresses. With neither it holds anything.
    rearmed: of some bytes that are cleared, the kernels leave them as 0, so that a stream clears them for all launches.
    """

    shape: tuple[int, ...]
    dtype: str
    zero: bool = False
    contents: Pack | None = None
    rearmed: bool = False


@dataclass(slots=True)
class Launch:
    """One launch and everything that must stay alive until it has finished.

    inputs: named arrays, on the host or on this device.
    outputs: what to produce; results appear under the same names in `Event.outputs`.
    oracle: computes the outputs from host copies of the inputs; runs on the mock device's own thread.
    steps: the kernels, run in this order. Empty on a device that runs no kernels, and where all outputs are zero.
    scratch: by name, beside the operands.
    updates: names of inputs that the steps, or the oracle, write in place. On CUDA these must lie on the device.
    returned: names of inputs that the steps write, wherever they lie: one on the host is copied up and down again.
    recording: says which launches are alike but for their operands' contents, so that a device may record one and
        replay it for the others (`gpu_actors.devices.recorded`); None: this one is not worth it.
    recording_keeps: names of inputs that stay where they are between those.
    """

    key: DispatchKey | None
    inputs: Mapping[str, Any]
    outputs: Mapping[str, OutputSpec]
    oracle: Callable[[Mapping[str, Any]], Outputs]
    steps: tuple[Step, ...] = ()
    scratch: Mapping[str, ScratchSpec] = field(default_factory=dict)
    updates: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    recording: Hashable | None = None
    recording_keeps: tuple[str, ...] = ()


def zero_launch(key: DispatchKey | None, q: Any, outputs: Mapping[str, OutputSpec]) -> Launch:
    """The launch of a problem whose whole answer is 0: no kernel, on any device. q: says where the answer is to lie."""
    zeroed = {name: spec._replace(zero=True) for name, spec in outputs.items()}
    return Launch(key, {"q": q}, zeroed, lambda _: {name: np.zeros(spec.shape) for name, spec in zeroed.items()})


class RecordingStats(NamedTuple):
    """recorded: launches that were recorded. replayed: launches that used a record. dropped: records given up."""

    recorded: int
    replayed: int
    dropped: int


class Event(ABC):
    """The end of one launch."""

    outputs: Outputs

    @abstractmethod
    def done(self) -> bool:
        """True once `wait` would return or raise at once. Never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the launch has finished and its outputs are readable.

        Raises `LaunchError`, `OutOfDeviceMemory` or `ContextLost` where the launch failed, and `ActorStopped` where
        the device was closed first. Called from a completion thread only.
        """

    def failure(self) -> BaseException | None:
        """`wait`, but gives what that raises, or None."""
        try:
            self.wait()
        except BaseException as error:
            return error
        return None


class Stream(ABC):
    """An in-order queue of launches. Used by one actor thread, closed by any."""

    @abstractmethod
    def launch(self, launch: Launch) -> Event:
        """Enqueue and return at once.

        Raises what `Event.wait` would, where the failure shows already here; then nothing was enqueued.
        """

    def recording_stats(self) -> RecordingStats:
        """What was recorded and replayed on this stream."""
        return RecordingStats(0, 0, 0)

    @abstractmethod
    def close(self) -> None:
        """Release the stream. Events that can no longer finish raise `ActorStopped`."""


class Device(ABC):
    """A device that a ContextActor owns.

    All methods but `info` are called from actor threads, which call `bind_thread` first.
    """

    info: DeviceInfo
    builds_kernels: bool = False

    @abstractmethod
    def open_stream(self, name: str) -> Stream:
        """A new stream for the actor of that name."""

    def build(self, source: KernelSource, arch: str) -> Kernel:
        """Build a kernel from its source, on a device that ``builds_kernels`` rather than loads cubins.

        Called from a compile thread; may take seconds. Raises `CompileError`.
        """
        raise LaunchError(f"{self.info.name} loads cubins and builds nothing")

    @abstractmethod
    def load(self, cubin: Cubin, entry: str) -> Kernel:
        """Load an entry point. Loading a cubin again is cheap while a kernel of it is held. Raises `LaunchError`.

        The device may unload it once the `Kernel` and every launch and recording of it are gone.
        """

    @abstractmethod
    def allocate(self, shape: tuple[int, ...], dtype: str, zero: bool = False) -> Any:
        """An array that stays on the device across launches, which use it without a copy.

        It may be in ``Launch.inputs`` and ``Launch.updates``, whole or as a view; its memory is given back with the
        last reference, when no launch may use it any more. zero: cleared, else it holds anything. dtype: by its NumPy
        or ml_dtypes name. Raises `OutOfDeviceMemory`.
        """

    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        """The 128 bytes that kernels take for it. Raises LaunchError where the device has no TMA or refuses it."""
        raise LaunchError(f"{self.info.name} has no tensor maps")

    @abstractmethod
    def probe(self) -> None:
        """Prove that the device makes progress: enqueue something and wait for it. Raises what `Event.wait` does."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent; never blocks on a hung launch."""

    def note_caller(self) -> Any:
        """Notes of the thread that submits a request: the streams that its libraries use."""
        return None

    def bind_thread(self) -> None:
        """Make the device current on the calling thread, on devices that need it."""
        return
