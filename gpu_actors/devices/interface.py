"""The interface of every device: buffers in, one launch, an event out.

A `Launch` describes its work in three ways: by its `DispatchKey`, as kernels with packed arguments, and as an oracle
over host arrays. CUDA and the emulated device run the kernels, and the mock device runs the oracle. No code above this
module depends on the choice.

    Device.open_stream() -> Stream.launch(Launch) -> Event.wait() -> Event.outputs
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
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

    memory: total bytes, None for a device on the host. invariant: of `ContextOptions`.
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
        """The memory of operands besides the host: "cpu" or "cuda:N"."""
        return f"cuda:{self.index}" if self.kind == "cuda" else "cpu"


class LaunchGeometry(NamedTuple):
    """A grid of blocks of threads, with the dynamic shared memory of a block in bytes."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int


class Buffer(NamedTuple):
    """The memory of an operand on the device. strides: in elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class TensorMap(NamedTuple):
    """An operand as the tensor memory accelerator (TMA) sees it.

    address: of element 0.
    shape: elements, innermost first.
    strides: bytes of every axis but the innermost.
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

    into: the caller's array to fill. None: a new array.
    zero: clear it before the first step, for kernels that add to it.
    """

    shape: tuple[int, ...]
    dtype: str
    into: Any = None
    zero: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loaded entry point.

    handle: the object of the device's loader.
    parameter_bytes: the size of each parameter, if a device that builds kernels knows it.
    """

    entry: str
    handle: Any
    parameter_bytes: tuple[int, ...] | None = None


class Kernels(tuple[Kernel, ...]):
    """Loaded kernels that a launch takes together.

    memo: what is bound to them and costs little, by what it is for. It is let go of with them, so that nothing else
    keeps a kernel loaded.
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
"""Turns the buffers of a launch's operands, by name, into the bytes of a kernel's parameter struct."""


Params: TypeAlias = bytes | tuple[bytes, ...]
"""The bytes of a kernel's only parameter, or of each of them."""
StepPack: TypeAlias = Callable[[Mapping[str, Buffer]], Params]


class Step(NamedTuple):
    """One kernel of a launch: the loaded kernel, its grid, and the function that packs its parameters."""

    kernel: Kernel
    geometry: LaunchGeometry
    pack: StepPack


class Steps(tuple[Step, ...]):
    """The kernels of a launch, in order.

    placement: what a device knows of launches with these very steps, or None.
    """

    placement: Any = None


class ScratchSpec(NamedTuple):
    """Device memory that a launch uses between its steps.

    zero: clear it before the first step.
    contents: makes its bytes from the buffers of inputs and outputs. So a kernel gets a table of addresses. Without
        zero and contents it may hold anything.
    rearmed: the kernels leave cleared memory as 0 again, so that a stream clears it once for all launches.
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
    oracle: computes the outputs from host copies of the inputs. It runs on the mock device's own thread.
    steps: the kernels, run in this order. Empty on a device that runs no kernels, and if all outputs are zero.
    scratch: by name, beside the operands.
    updates: names of inputs that the steps, or the oracle, write in place. On CUDA these must be on the device.
    returned: names of inputs that the steps write, on the host or the device: one on the host is copied up and down.
    """

    key: DispatchKey | None
    inputs: Mapping[str, Any]
    outputs: Mapping[str, OutputSpec]
    oracle: Callable[[Mapping[str, Any]], Outputs]
    steps: tuple[Step, ...] = ()
    scratch: Mapping[str, ScratchSpec] = field(default_factory=dict)
    updates: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()


def zero_launch(key: DispatchKey | None, q: Any, outputs: Mapping[str, OutputSpec]) -> Launch:
    """The launch of a problem whose whole answer is 0, without a kernel. q: the answer is allocated in its memory."""
    zeroed = {name: spec._replace(zero=True) for name, spec in outputs.items()}
    return Launch(key, {"q": q}, zeroed, lambda _: {name: np.zeros(spec.shape) for name, spec in zeroed.items()})


class Event(ABC):
    """The end of one launch."""

    outputs: Outputs

    @abstractmethod
    def done(self) -> bool:
        """True once `wait` would return or raise at once. Never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the launch has finished and its outputs are readable.

        Raises `LaunchError`, `OutOfDeviceMemory` or `ContextLost` if the launch failed, and `ActorStopped` if the
        device was closed first. Called from a completion thread only.
        """

    def failure(self) -> BaseException | None:
        """`wait`, and return the error that it raises, or None."""
        try:
            self.wait()
        except BaseException as error:
            return error
        return None


class FinishedEvent(Event):
    """A launch that ended when it began, with outputs or with an error."""

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
    """Launches of one stream that end together, such as those of a model's layers. For one thread at a time.

    Those of this one are launches like others, which are waited for.

    captured: whether the latest launch went into a capture of the caller's, which has not run.
    keeps: what keeps the stream of the latest launch alive.
    """

    captured: bool = False
    keeps: object = None

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def add(self, launch: Launch, stream: int | None = None) -> Event:
        """Launch behind those before, on the calling thread.

        Of operands on the device the event is over at once: its outputs are complete in the order of ``stream``, the
        caller's own, or of the series' where it is None. A launch on the host's has to be waited for.
        Launches with the same ``steps`` differ in their arrays on the device alone: the first one uploads the others.
        Raises what `Event.wait` raises, and `InvalidRequest` for an array that cannot be used where it lies, and for a
        stream that is being captured where the launch would allocate, copy from the host or wait for another stream.
        """
        return self._stream.launch(launch)

    def ready(self, launch: Launch) -> None:
        """Take the memory of a launch that will be added, and upload what it reads from the host.

        It may be captured then. Raises as `add`.
        """

    def renew(self, steps: Sequence[Step], launch: Launch) -> None:
        """Replace what launches with these steps read from the host by that of ``launch``, at the same addresses.

        It is uploaded before the next launch, or `replay`. What was enqueued before must be over.
        """

    def upload(self, stream: int | None = None) -> None:
        """Enqueue on ``stream`` what its launches read from the host, before captured ones are replayed there.

        Raises `InvalidRequest` where the stream is being captured, and as `add`.
        """

    def repeat(
        self, launch: Launch, kept: Mapping[str, Any], arrays: Mapping[str, Any], stream: int | None = None
    ) -> bool:
        """Make a launch of this series again on other arrays, if it was on arrays at these very addresses before.

        kept, arrays: all of its operands on the device by name, and outputs, of the same shapes and strides; those of
        ``kept`` belong to no stream and stay. False: not launched.
        """
        return False

    def capturing(self) -> int | None:
        """The caller's stream of the latest launch, while it is being captured: no `mark` and no `end` then."""
        return None

    def mark(self) -> Event:
        """The end of its launches so far. The event has no outputs."""
        return FinishedEvent()

    def end(self) -> Event:
        """The end of all of its launches. None may follow. The event has no outputs."""
        return FinishedEvent()

    def drop(self) -> None:
        """`end` it with the next launch of the stream. For any thread, in a finalizer too: it takes no lock."""


class Stream(ABC):
    """An in-order queue of launches. One actor's thread launches; others may use a `Series` of it, and close it."""

    @abstractmethod
    def launch(self, launch: Launch) -> Event:
        """Enqueue and return at once.

        Raises what `Event.wait` raises if the failure shows here already. Then nothing was enqueued.
        """

    def series(self) -> Series:
        """Begin launches that end together. They are ordered behind what was launched before."""
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
    """Why a key's kernel must not run here, once there is one that must not."""

    @property
    def identity(self) -> tuple[str, ...]:
        """What decides, beside a kernel's code, how it computes: the machine, its driver, how it is emulated."""
        return self.info.kind, self.info.name

    @abstractmethod
    def open_stream(self, name: str) -> Stream:
        """A new stream for the actor with this name."""

    def build(self, source: KernelSource, arch: str) -> Kernel:
        """Build a kernel from its source, on a device that ``builds_kernels`` and loads no cubins.

        Called from a compile thread; may take seconds. Raises `CompileError`.
        """
        raise LaunchError(f"{self.info.name} loads cubins and builds nothing")

    @abstractmethod
    def load(self, cubin: Cubin, entry: str) -> Kernel:
        """Load an entry point. Loading a cubin again is cheap while a kernel of it is alive. Raises `LaunchError`.

        The device may unload it once no `Kernel`, launch or capture refers to it.
        """

    @abstractmethod
    def allocate(self, shape: tuple[int, ...], dtype: str, zero: bool = False) -> Any:
        """An array that stays on the device across launches, which use it without a copy.

        It may be in ``Launch.inputs`` and ``Launch.updates``, whole or as a view. Its memory is freed with the last
        reference, when no launch may use it any more.
        dtype: by its NumPy or ml_dtypes name.
        zero: whether it is cleared. If not, it may hold anything.
        Raises `OutOfDeviceMemory`.
        """

    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        """The map's 128 bytes for kernels. Raises LaunchError if the device has no TMA or refuses it."""
        raise LaunchError(f"{self.info.name} has no tensor maps")

    @abstractmethod
    def probe(self) -> None:
        """Prove that the device makes progress: enqueue something and wait for it. Raises what `Event.wait` does."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent. Never blocks on a hung launch."""

    def note_caller(self) -> Any:
        """Note the streams that libraries use on the thread that submits a request."""
        return None

    def bind_thread(self) -> None:
        """Make the device current on the calling thread, one of this package's own, on devices that need it."""
        return

    def is_current(self) -> bool:
        """Whether the calling thread may launch, which changes nothing for its own use of other devices."""
        return False
