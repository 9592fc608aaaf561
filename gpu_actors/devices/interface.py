"""The interface of every device: buffers in, one launch, an event out.

A `Launch` describes its work in three ways: by its `DispatchKey`, as kernels with packed arguments, and as an oracle
over host arrays. CUDA and the emulated device run the kernels, and the mock device runs the oracle. Code above this
module does not depend on which device runs the launch.

    Device.open_stream() -> Stream.launch(Launch) -> Event.wait() -> Event.outputs
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np

from gpu_actors.errors import GpuActorsError, LaunchError

if TYPE_CHECKING:
    from gpu_actors.attention.problem import DispatchKey
    from gpu_actors.compiling.source import Cubin, KernelSource

__all__ = [
    "Buffer",
    "Device",
    "DeviceInfo",
    "Event",
    "FinishedEvent",
    "Kernel",
    "Kernels",
    "Launch",
    "LaunchGeometry",
    "OutputSpec",
    "Pack",
    "Params",
    "ScratchSpec",
    "Series",
    "Step",
    "StepPack",
    "Steps",
    "Stream",
    "TensorMap",
    "zero_launch",
]


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The device of a context.

    memory: total bytes, None for a device on the host. invariant: the option of `ContextOptions`.
    """

    kind: str
    name: str
    arch: str
    index: int = 0
    memory: int | None = None
    multiprocessors: int | None = None
    runs_kernels: bool = True
    invariant: bool = False

    @property
    def device_name(self) -> str:
        """The memory, besides the host's, in which operands may lie: "cuda:N", or "cpu" where there is none."""
        return f"cuda:{self.index}" if self.kind == "cuda" else "cpu"


class LaunchGeometry(NamedTuple):
    """A grid of thread blocks. shared_bytes: the dynamic shared memory of each block."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int


class Buffer(NamedTuple):
    """Where an operand lies on the device. strides: in elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class TensorMap(NamedTuple):
    """An operand as the tensor memory accelerator (TMA) sees it.

    address: the address of element 0.
    shape: elements of each axis, innermost first.
    strides: bytes, for every axis but the innermost.
    box: elements of each axis that one copy moves.
    swizzle: how 16-byte units are permuted in shared memory.
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: Literal["none", "32B", "64B", "128B"]


class OutputSpec(NamedTuple):
    """An output to produce.

    into: the caller's array to fill. None: the device makes a new array.
    zero: clear the output before the first step, for kernels that add to it.
    """

    shape: tuple[int, ...]
    dtype: str
    into: Any = None
    zero: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loaded entry point.

    handle: what the device's loader returned for it.
    parameter_bytes: the size of each parameter, where the device builds kernels and knows the sizes.
    """

    entry: str
    handle: Any
    parameter_bytes: tuple[int, ...] | None = None


class Kernels(tuple[Kernel, ...]):
    """The loaded kernels of one launch.

    memo: small objects that refer to these kernels, by purpose. They are freed together with the kernels, so a memo
    never keeps a kernel loaded. It is emptied when it has ``MOST`` entries.
    """

    MOST = 256

    memo: dict[Any, Any]

    def __new__(cls, kernels: Iterable[Kernel]) -> Self:
        made = super().__new__(cls, kernels)
        made.memo = {}
        return made

    def remember(self, purpose: Any, value: Any) -> None:
        if len(self.memo) >= self.MOST:
            self.memo.clear()
        self.memo[purpose] = value


Outputs = Mapping[str, Any]
Pack: TypeAlias = Callable[[Mapping[str, Buffer]], bytes]
"""Packs a kernel's parameter struct into bytes, from the buffers of a launch's operands by name."""


Params: TypeAlias = bytes | tuple[bytes, ...]
"""The bytes of a kernel's only parameter, or the bytes of each parameter."""
StepPack: TypeAlias = Callable[[Mapping[str, Buffer]], Params]


class Step(NamedTuple):
    """One kernel of a launch: the loaded kernel, its grid, and the function that packs its parameters."""

    kernel: Kernel
    geometry: LaunchGeometry
    pack: StepPack


class Steps(tuple[Step, ...]):
    """The kernels of a launch, in order.

    placement: what a device remembers for launches with this same object as steps, or None.
    """

    placement: Any = None


class ScratchSpec(NamedTuple):
    """Device memory that a launch uses between its steps.

    zero: clear the memory before the first step.
    contents: makes the bytes that the memory holds from the buffers of inputs and outputs, for example a table of
        addresses. Without zero and contents the memory may hold anything.
    rearmed: the kernels find the memory cleared and leave it cleared, so a stream clears it once for all launches.
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
    outputs: the outputs to produce. Results have the same names in `Event.outputs`.
    oracle: computes the outputs from the inputs, on the host. It runs on the thread of the mock device's stream.
    steps: the kernels, run in this order. Empty on a device that runs no kernels, and if all outputs are zero.
    scratch: scratch memory by name. Kernels get it beside the operands.
    updates: names of inputs that the steps, or the oracle, write in place. On CUDA these must be on the device.
    returned: names of inputs that the steps write, on the host or the device. An input on the host is copied to the
        device and back.
    waited: names of inputs that earlier work of the launch's series waits for, so that a capture may hold them.
    """

    key: DispatchKey | None
    inputs: Mapping[str, Any]
    outputs: Mapping[str, OutputSpec]
    oracle: Callable[[Mapping[str, Any]], Outputs]
    steps: tuple[Step, ...] = ()
    scratch: Mapping[str, ScratchSpec] = field(default_factory=dict)
    updates: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    waited: Collection[str] = ()


def zero_launch(key: DispatchKey | None, q: Any, outputs: Mapping[str, OutputSpec]) -> Launch:
    """A launch without kernels, for a problem whose whole answer is 0. New outputs lie where q does."""
    zeroed = {name: spec._replace(zero=True) for name, spec in outputs.items()}
    return Launch(key, {"q": q}, zeroed, lambda _: {name: np.zeros(spec.shape) for name, spec in zeroed.items()})


class Event(ABC):
    """The end of one launch."""

    outputs: Outputs

    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would return or raise at once. Never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the launch has finished and its outputs are readable.

        Raises `LaunchError`, `OutOfDeviceMemory` or `ContextLost` if the launch failed, and `ActorStopped` if the
        device was closed first. Called from a completion thread only.
        """

    def failure(self) -> BaseException | None:
        """Call `wait`, and return the error that it raises, or None."""
        try:
            self.wait()
        except BaseException as error:
            return error
        return None


class FinishedEvent(Event):
    """The event of a launch that has already ended, with outputs or with an error."""

    __slots__ = ("_error", "outputs")

    def __init__(self, outputs: Outputs | None = None, error: GpuActorsError | None = None) -> None:
        self.outputs: Outputs = outputs if outputs is not None else {}
        self._error = error

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        if self._error is not None:
            raise self._error

    def failure(self) -> BaseException | None:
        return self._error


class Series:
    """Launches of one stream that end together, such as those of a model's layers. One thread at a time may use it.

    This base class makes ordinary launches, and the caller waits for each.

    captured: whether the latest launch was recorded by the caller's capture and has not run.
    keeps: the objects that keep the stream of the latest launch alive.
    """

    captured: bool = False
    keeps: object = None

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def add(self, launch: Launch, stream: int | None = None) -> Event:
        """Launch after the earlier launches of the series, on the calling thread.

        stream: the caller's own stream; None: the stream of the series.
        For operands on the device the event is done at once, and its outputs are complete in the order of the stream.
        For operands on the host the caller must wait for the event.
        Launches with the same ``steps`` may differ only in their arrays on the device: the first one uploads the other
        arrays for all of them.
        Raises what `Event.wait` raises, and `InvalidRequest` for an array that cannot be used where it lies, and for a
        stream that is being captured if the launch would allocate, copy from the host or wait for another stream.
        """
        return self._stream.launch(launch)

    def ready(self, launch: Launch) -> None:
        """Allocate the memory of a launch that will be added, and upload what the launch reads from the host.

        Afterwards a capture may record the launch. Raises what `add` raises.
        """

    def renew(self, steps: Sequence[Step], launch: Launch) -> None:
        """Give launches with these steps the host data of ``launch`` in place of their own, at the same addresses.

        The new data is uploaded before the next launch, or by `upload`. Earlier work must have finished.
        """

    def upload(self, stream: int | None = None) -> None:
        """Enqueue on ``stream`` the uploads of what the launches read from the host.

        Called before captured launches are replayed there. Raises `InvalidRequest` if the stream is being captured,
        and what `add` raises.
        """

    def repeat(
        self, launch: Launch, kept: Mapping[str, Any], arrays: Mapping[str, Any], stream: int | None = None
    ) -> bool:
        """Repeat a launch of this series, if an earlier one was made on arrays at the same addresses.

        kept, arrays: together all inputs and outputs on the device by name, of the same shapes and strides. Those of
        ``kept`` belong to no stream and stay alive.
        Returns False if nothing was launched.
        """
        return False

    def capturing(self) -> int | None:
        """The caller's stream of the latest launch if it is being captured, else None.

        During the capture neither `mark` nor `end` may be called.
        """
        return None

    def mark(self) -> Event:
        """Return an event for the end of the launches so far. It has no outputs."""
        return FinishedEvent()

    def end(self) -> Event:
        """Return an event for the end of all launches. It has no outputs. No launch may follow."""
        return FinishedEvent()

    def drop(self) -> None:
        """Let the stream's next launch `end` the series. Takes no lock, so any thread and any finalizer may call it."""


class Stream(ABC):
    """An in-order queue of launches.

    Only the thread of one actor launches. Other threads may use a `Series` of the stream, and close the stream.
    """

    @abstractmethod
    def launch(self, launch: Launch) -> Event:
        """Enqueue a launch and return at once.

        Raises what `Event.wait` raises if the failure is already known here. The launch then has no event,
        though a part of it may have been enqueued.
        """

    def series(self) -> Series:
        """Begin a series: launches that end together. They run after the earlier launches of this stream."""
        return Series(self)

    @abstractmethod
    def close(self) -> None:
        """Release the stream. Events that can no longer finish raise `ActorStopped`."""


class Device(ABC):
    """A device that a ContextActor owns.

    All methods but `info` are called from actor threads, which call `bind_thread` first.
    """

    info: DeviceInfo
    builds_kernels: bool = False
    barred: Callable[[DispatchKey], GpuActorsError | None] | None = None
    """Returns why the kernel of a key must not run here, or None if it may. None until a kernel is quarantined."""

    @property
    def identity(self) -> tuple[str, ...]:
        """What else than its code decides how a kernel computes: the machine, its driver, the options of emulation."""
        return self.info.kind, self.info.name

    @abstractmethod
    def open_stream(self, name: str) -> Stream:
        """Open a new stream for the actor with this name."""

    def build(self, source: KernelSource, arch: str) -> Kernel:
        """Build a kernel from its source. Only a device with ``builds_kernels`` can; such a device loads no cubins.

        Compile threads call it. It may take seconds. Raises `CompileError`.
        """
        raise LaunchError(f"{self.info.name} loads cubins and builds nothing")

    @abstractmethod
    def load(self, cubin: Cubin, entry: str) -> Kernel:
        """Load an entry point of a cubin. Loading a cubin again is cheap while a kernel of it is alive.

        The device may unload the cubin once no `Kernel`, launch or capture refers to it. Raises `LaunchError`.
        """

    @abstractmethod
    def allocate(self, shape: tuple[int, ...], dtype: str, zero: bool = False) -> Any:
        """Allocate an array that stays on the device across launches. Launches use it without a copy.

        The array may be in ``Launch.inputs`` and ``Launch.updates``, whole or as a view. Its memory is freed with the
        last reference, and no launch may use the array by then.
        dtype: the NumPy or ml_dtypes name.
        zero: whether the array is cleared. Otherwise it may hold anything.
        Raises `OutOfDeviceMemory`.
        """

    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        """The map's 128 bytes for kernels. Raises LaunchError if the device has no TMA or refuses the map."""
        raise LaunchError(f"{self.info.name} has no tensor maps")

    @abstractmethod
    def probe(self) -> None:
        """Prove that the device makes progress: enqueue something and wait for it. Raises what `Event.wait` does."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Later calls do nothing. Never blocks on a hung launch."""

    def note_caller(self) -> Any:
        """Return the streams that are current in array libraries on the thread that submits a request, or None."""
        return None

    def bind_thread(self) -> None:
        """Make the device current on the calling thread, a thread of this package, on devices that need it."""
        return

    def is_current(self) -> bool:
        """Whether the calling thread may launch without changing which device is current on it."""
        return False
