"""What tests of the benchmark share: a clock that is moved by hand, and a stage on the mock device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from inside.bench import HostArrays, Peer, Plan, Prepared, RecordingContext, RecordingDevice, Stage
from inside.devices import Device, Event, Launch, Stream

from gpu_actors import ContextOptions

PLAN = Plan(warmup=1, repeats=4, turns=2)


class FakeClock:
    """Milliseconds that pass only when `work` is called. late: how many holds run into their limit."""

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


class Spoiling(RecordingDevice):
    """Spoils what launches answer. spoil: changes an event's outputs."""

    def __init__(self, inner: Device, spoil: Callable[[Any], None]) -> None:
        super().__init__(inner)
        self._spoil = spoil

    def open_stream(self, name: str) -> Stream:
        return _SpoilingStream(super().open_stream(name), self._spoil)


class _SpoilingStream(Stream):
    def __init__(self, inner: Stream, spoil: Callable[[Any], None]) -> None:
        self._inner, self._spoil = inner, spoil

    def launch(self, launch: Launch) -> Event:
        event = self._inner.launch(launch)
        event.wait()
        self._spoil(event.outputs)
        return event

    def close(self) -> None:
        self._inner.close()


class Spoilt(RecordingContext):
    """A recording context on a device that spoils its answers."""

    spoil: Callable[[Any], None] = staticmethod(lambda outputs: None)

    def make_device(self) -> Device:
        self.recorder = RecordingDevice(Spoiling(super().make_device(), self.spoil))
        return self.recorder


@contextmanager
def stage(
    clock: FakeClock | None = None, spoil: Callable[[Any], None] | None = None, **options: Any
) -> Iterator[Stage]:
    """On the mock device, whose launches take no time on the clock."""
    opening = RecordingContext("mock", ContextOptions(**options)) if spoil is None else Spoilt("mock")
    if spoil is not None:
        opening.spoil = spoil  # type: ignore[attr-defined]
    with opening as context:
        stream = opening.recorder.inner.open_stream("bench")
        yield Stage(context, opening.recorder, stream, clock or FakeClock(), HostArrays())


def peer(prepare: Callable[..., Prepared], name: str = "peer", module: str = "json") -> Peer:
    return Peer(name, module, ("forward",), prepare)
