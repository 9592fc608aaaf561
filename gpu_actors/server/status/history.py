"""Records of the last minutes, and History: histograms of a context's actors over these minutes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from gpu_actors.runtime.meter import Histogram

if TYPE_CHECKING:
    from gpu_actors.handles.gpu_context import GpuContext

__all__ = ["KINDS", "SLOT", "WINDOWS", "History", "Records"]

KINDS = ("latency", "queue", "launch", "batch")
WINDOWS = (60, 300)
"""Seconds of each window."""
SLOT = 5.0
"""Seconds between two records."""

Counts = dict[str, dict[str, list[int]]]


class Timed(Protocol):
    """The counts up to a moment."""

    @property
    def time(self) -> float:
        """``time.monotonic()`` seconds."""


T = TypeVar("T", bound=Timed)


class Records(deque[T]):
    """Records of the last five minutes, at least `SLOT` seconds apart. Only one thread at a time may use them."""

    def __init__(self, first: T) -> None:
        super().__init__([first], maxlen=int(WINDOWS[-1] / SLOT) + 1)

    def before(self, now: T, seconds: float) -> T:
        """The latest record that is at least ``seconds`` older than ``now``, or the oldest one."""
        return next((one for one in reversed(self) if one.time <= now.time - seconds), self[0])

    def add(self, now: T) -> None:
        """Append a record, if the last one is old enough."""
        if now.time - self[-1].time >= SLOT:
            self.append(now)


class _Record(NamedTuple):
    time: float
    counts: Counts
    answered: int


class History:
    """Recent counts of one context. Only one thread may use it. To read a mailbox takes its lock for microseconds."""

    def __init__(self, context: GpuContext) -> None:
        children = context._children
        self._mailboxes = {name: cell.mailbox for name, cell in children.cells.items()}
        self._clock = children.clock
        for mailbox in self._mailboxes.values():
            mailbox.measure(self._clock)
        self._records = Records(self._now())

    def read(self) -> dict[str, Any]:
        """The histograms of each window: counts by bucket, for each actor that has any. rate: answers per second over
        the last five seconds or a little more."""
        now = self._now()
        windows = {str(window): self._window(now, window) for window in WINDOWS}
        before = self._records.before(now, SLOT)
        rate = (now.answered - before.answered) / max(now.time - before.time, 1e-3)
        self._records.add(now)
        meter = self._mailboxes[next(iter(self._mailboxes))].measure(self._clock)
        bounds = {kind: list((meter.batch if kind == "batch" else meter.queue).bounds) for kind in KINDS}
        return {"bounds": bounds, "windows": windows, "rate": round(rate, 2)}

    def _window(self, now: _Record, seconds: float) -> dict[str, Any]:
        before = self._records.before(now, seconds)
        actors = {}
        for name, kinds in now.counts.items():
            changed = {kind: _less(counts, before.counts[name][kind]) for kind, counts in kinds.items()}
            if any(map(any, changed.values())):
                actors[name] = changed
        return {"seconds": round(now.time - before.time, 1), "actors": actors}

    def _now(self) -> _Record:
        counts: Counts = {}
        answered = 0
        for name, mailbox in self._mailboxes.items():
            meter = mailbox.measure(self._clock)
            with mailbox.lock:
                latency = [histogram.counts() for histogram in meter.latency.values()]
                rest: Mapping[str, Histogram] = {"queue": meter.queue, "launch": meter.launch, "batch": meter.batch}
                counts[name] = {kind: histogram.counts() for kind, histogram in rest.items()}
            counts[name]["latency"] = [sum(column) for column in zip(*latency, strict=True)]
            answered += sum(counts[name]["latency"])
        return _Record(time.monotonic(), counts, answered)


def _less(now: list[int], before: list[int]) -> list[int]:
    return [later - earlier for later, earlier in zip(now, before, strict=True)]
