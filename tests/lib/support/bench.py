"""Shared by tests of the benchmark: a clock that is moved by hand, and a stage on the mock device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from inside.bench import HostArrays, Peer, Plan, Prepared, RecordingContext, RecordingDevice, Stage
from inside.devices import Device, Event, Launch, Stream

from gpu_actors import ContextOptions

PLAN = Plan(warmup=1, repeats=4, turns=2)


class FakeClock:
    """Time in milliseconds that passes only when `work` is called. late: how many holds run into their limit."""

    def __init__(self, late: int = 0) -> None:
        self.now = 0.0
        self.calls: list[str] = []
        self._late = late

    def work(self, milliseconds: float) -> None:
        self.now += milliseconds

    def hold(self) -> None:
        self.calls.append("hold")

    def release(self) -> bool:
        self.calls.append("release")
        self._late -= 1
        return self._late < 0

    def mark(self) -> float:
        self.calls.append("mark")
        return self.now

    def elapsed(self, begin: float, end: float) -> float:
        assert self.calls[-1] == "synchronize", "a time was read before the stream was idle"
        return end - begin

    def synchronize(self) -> None:
        self.calls.append("synchronize")


class CorruptingDevice(RecordingDevice):
    """Corrupts the outputs of launches. corrupt: changes an event's outputs."""

    def __init__(self, inner: Device, corrupt: Callable[[Any], None]) -> None:
        super().__init__(inner)
        self._corrupt = corrupt

    def open_stream(self, name: str) -> Stream:
        return _CorruptingStream(super().open_stream(name), self._corrupt)


class _CorruptingStream(Stream):
    def __init__(self, inner: Stream, corrupt: Callable[[Any], None]) -> None:
        self._inner, self._corrupt = inner, corrupt

    def launch(self, launch: Launch) -> Event:
        event = self._inner.launch(launch)
        event.wait()
        self._corrupt(event.outputs)
        return event

    def close(self) -> None:
        self._inner.close()


class CorruptingContext(RecordingContext):
    """A recording context on a device that corrupts its outputs."""

    corrupt: Callable[[Any], None] = staticmethod(lambda outputs: None)

    def make_device(self) -> Device:
        self.recorder = RecordingDevice(CorruptingDevice(super().make_device(), self.corrupt))
        return self.recorder


@contextmanager
def stage(
    clock: FakeClock | None = None, corrupt: Callable[[Any], None] | None = None, **options: Any
) -> Iterator[Stage]:
    """A stage on the mock device, whose launches take no time on the clock."""
    opening = RecordingContext("mock", ContextOptions(**options)) if corrupt is None else CorruptingContext("mock")
    if corrupt is not None:
        opening.corrupt = corrupt  # type: ignore[attr-defined]
    with opening as context:
        stream = opening.recorder.inner.open_stream("bench")
        yield Stage(context, opening.recorder, stream, clock or FakeClock(), HostArrays())


def peer(prepare: Callable[..., Prepared], name: str = "peer", module: str = "json") -> Peer:
    return Peer(name, module, ("forward",), prepare)
