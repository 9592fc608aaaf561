"""Timing on a device: events around each call, the calls of all subjects in turns, quantiles of their times.

    hold | mark call mark | mark call mark | ... | release        one turn of one subject
         |<-- everything is enqueued here -->|

While the stream is held, nothing runs. The enqueued work then runs back to back, so the time between two marks has no
time of the host. Subjects take turns, so a change of the GPU's clock or of other work affects all of them.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from gpu_actors.compiling.compiler import Compiler
from gpu_actors.compiling.source import KernelSource
from gpu_actors.devices.cuda.device import CudaDevice
from gpu_actors.devices.cuda.stream import CudaStream
from gpu_actors.devices.interface import Event, Launch, Stream
from gpu_actors.errors import InvalidRequest

__all__ = [
    "Call",
    "CudaClock",
    "EventClock",
    "HostClock",
    "Plan",
    "Quantiles",
    "Timing",
    "measure_in_turns",
    "quantiles",
]

Call: TypeAlias = Callable[[], object]
"""Enqueues one piece of work and returns."""


class EventClock(Protocol):
    """A stream's clock. Everything is enqueued on that one stream."""

    def hold(self) -> None:
        """Stop the stream until `release`, or until some limit has passed."""

    def release(self) -> bool:
        """Let the stream continue. Returns False if it had already continued, because the limit had passed."""

    def mark(self) -> Any:
        """Enqueue a mark."""

    def elapsed(self, begin: Any, end: Any) -> float:
        """The milliseconds between two marks, both of which have been reached."""

    def synchronize(self) -> None:
        """Wait until all enqueued work has finished."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of the times of ``n`` calls, in milliseconds."""

    n: int
    least: float
    p10: float
    p25: float
    median: float
    p75: float
    p90: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How often to call: ``warmup`` rounds over all calls of a subject, then ``repeats`` calls in ``turns`` turns."""

    warmup: int = 3
    repeats: int = 30
    turns: int = 3

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise InvalidRequest(name, value, "must be 1 or more")


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of a subject.

    times: None if it failed.
    held: whether every call was enqueued before the stream continued. Otherwise times may include time of the host.
    error: the subject's error, or None.
    """

    times: Quantiles | None
    held: bool = True
    error: str | None = None


def quantiles(samples: Sequence[float]) -> Quantiles:
    """The quantiles of one or more times, with linear interpolation between the two nearest."""
    if not samples:
        raise InvalidRequest("samples", samples, "must hold one time or more")
    return Quantiles(len(samples), *np.percentile(samples, (0, 10, 25, 50, 75, 90, 100)).tolist())


def measure_in_turns(
    subjects: Mapping[str, Sequence[Call]], clock: EventClock, plan: Plan, between: Call = lambda: None
) -> dict[str, Timing]:
    """Time every subject. Its calls do the same work on different data, in rotation.

    between: called after each turn, with the stream idle.
    If a subject or ``between`` after it raises, its `Timing` has the error and it is left out from then on.
    """
    running = {name: _Subject(list(calls)) for name, calls in subjects.items()}
    # The first turns get the remainder.
    counts = (plan.repeats // plan.turns + (number < plan.repeats % plan.turns) for number in range(plan.turns))
    steps = [functools.partial(_Subject.warm_up, clock=clock, rounds=plan.warmup)]
    steps += [functools.partial(_Subject.turn, clock=clock, calls=count) for count in counts]
    for step in steps:
        for subject in running.values():
            if subject.error is None:
                subject.attempt(step, between)
    return {name: subject.timing() for name, subject in running.items()}


class _Subject:
    def __init__(self, calls: list[Call]) -> None:
        self.error: str | None = None
        self._calls = calls
        self._next = 0
        self._times: list[float] = []
        self._held = True

    def attempt(self, step: Callable[[_Subject], None], between: Call) -> None:
        try:
            step(self)
            between()
        except Exception as error:  # a library may raise anything, and the device may be lost
            self.error = f"{type(error).__name__}: {error}"

    def warm_up(self, clock: EventClock, rounds: int) -> None:
        if not self._calls:
            raise InvalidRequest("calls", [], "must hold one call or more")
        for _ in range(rounds):
            for call in self._calls:
                call()
        clock.synchronize()

    def turn(self, clock: EventClock, calls: int) -> None:
        marks: list[tuple[Any, Any]] = []
        clock.hold()
        try:
            for _ in range(calls):
                call = self._calls[self._next % len(self._calls)]
                self._next += 1
                begin = clock.mark()
                call()
                marks.append((begin, clock.mark()))
        finally:
            held = clock.release()
        clock.synchronize()
        self._held = self._held and held
        self._times += [clock.elapsed(begin, end) for begin, end in marks]

    def timing(self) -> Timing:
        if self.error is not None:
            return Timing(None, error=self.error)
        return Timing(quantiles(self._times), self._held)


# Clocks

_HOLD = """\
struct Params { volatile int* state; long long limit; };

extern "C" __global__ void hold(const __grid_constant__ Params p) {
  const long long start = clock64();
  while (p.state[0] == 0) {
    if (clock64() - start > p.limit) {
      p.state[1] = 1;
      return;
    }
    __nanosleep(500);
  }
}
"""
_LIMIT = 400_000_000
"""The longest hold in cycles: about 0.2 s, far longer than enqueueing a turn takes."""
_STATE_BYTES = 8


class CudaClock:
    """Times a stream of a CUDA device. Meanwhile only the user of the clock may enqueue on the stream.

    A kernel of one thread holds the stream: it polls a flag in page-locked memory until the flag is set.

    It needs NVRTC. Raises what compiling and loading a kernel raise.
    """

    def __init__(self, device: CudaDevice, stream: CudaStream) -> None:
        from cupy.cuda import runtime

        assert stream.handle is not None
        self.handle: Any = stream.handle
        self._device = device
        self._runtime = runtime
        cubin = Compiler().compile(KernelSource("hold.cu", _HOLD, ("hold",)), device.info.arch)
        self._hold = device.load(cubin, "hold")  # keeping the kernel keeps its module loaded
        address = device.driver.call(device.driver.api.allocate_pinned, _STATE_BYTES)
        self._state = (ctypes.c_int32 * 2).from_address(address)
        self._address = address
        self._events: list[int] = []
        self._free: list[int] = []

    def hold(self) -> None:
        self._state[0] = self._state[1] = 0
        params = struct.pack("<Qq", self._address, _LIMIT)
        driver = self._device.driver
        driver.call(driver.api.launch_kernel, self._hold.handle.handle, (1, 1, 1), (1, 1, 1), 0, self.handle, params)

    def release(self) -> bool:
        late = bool(self._state[1])
        self._state[0] = 1
        return not late

    def mark(self) -> int:
        event = self._free.pop() if self._free else int(self._runtime.eventCreate())
        self._events.append(event)
        self._runtime.eventRecord(event, self.handle)
        return event

    def elapsed(self, begin: Any, end: Any) -> float:
        return float(self._runtime.eventElapsedTime(begin, end))

    def synchronize(self) -> None:
        self._runtime.streamSynchronize(self.handle)

    def reuse(self) -> None:
        """Reuse the events of all marks so far. These marks must not be read afterwards."""
        self._free += self._events
        self._events = []

    def close(self) -> None:
        """Free everything. The clock must not be used afterwards."""
        self.reuse()
        for event in self._free:
            self._runtime.eventDestroy(event)
        self._free = []
        self._device.driver.api.free_pinned(self._address)


class HostClock(Stream):
    """A stream that is its own clock. It cannot be held: a mark waits for all earlier launches."""

    def __init__(self, inner: Stream) -> None:
        self._inner = inner
        self._pending: list[Event] = []

    def launch(self, launch: Launch) -> Event:
        event = self._inner.launch(launch)
        self._pending.append(event)
        return event

    def close(self) -> None:
        self._inner.close()

    def hold(self) -> None:
        return

    def release(self) -> bool:
        return True

    def mark(self) -> float:
        self.synchronize()
        return time.perf_counter()

    def elapsed(self, begin: float, end: float) -> float:
        return (end - begin) * 1e3

    def synchronize(self) -> None:
        pending, self._pending = self._pending, []
        for event in pending:
            event.wait()
