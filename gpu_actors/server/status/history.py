"""History: the histograms of a context's actors over the last minutes, from those since the first read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu_actors.runtime.meter import Histogram

if TYPE_CHECKING:
    from gpu_actors.handles.gpu_context import GpuContext

__all__ = ["KINDS", "SLOT", "WINDOWS", "History"]

KINDS = ("latency", "queue", "launch", "batch")
WINDOWS = (60, 300)
"""Seconds."""
SLOT = 5.0
"""Seconds between two records."""

Counts = dict[str, dict[str, list[int]]]


class _Record(NamedTuple):
    time: float
    counts: Counts
    answered: int


class History:
    """Records of the last five minutes. For one thread. Reading a mailbox's meter takes its lock for microseconds."""

    def __init__(self, context: GpuContext) -> None:
        children = context._children
        self._mailboxes = {name: cell.mailbox for name, cell in children.cells.items()}
        self._clock = children.clock
        for mailbox in self._mailboxes.values():
            mailbox.measure(self._clock)
        self._records: deque[_Record] = deque(maxlen=int(WINDOWS[-1] / SLOT) + 1)
        self._records.append(self._now())

    def read(self) -> dict[str, Any]:
        """The histograms of each window: counts by bucket, of each actor that has any. rate: answers a second, over the
        last five seconds or a little more."""
        now = self._now()
        windows = {str(window): self._window(now, window) for window in WINDOWS}
        before = self._before(now, SLOT)
        rate = (now.answered - before.answered) / max(now.time - before.time, 1e-3)
        if now.time - self._records[-1].time >= SLOT:
            self._records.append(now)
        meter = self._mailboxes[next(iter(self._mailboxes))].measure(self._clock)
        bounds = {kind: list((meter.batch if kind == "batch" else meter.queue).bounds) for kind in KINDS}
        return {"bounds": bounds, "windows": windows, "rate": round(rate, 2)}

    def _window(self, now: _Record, seconds: float) -> dict[str, Any]:
        before = self._before(now, seconds)
        actors = {}
        for name, kinds in now.counts.items():
            changed = {kind: _less(counts, before.counts[name][kind]) for kind, counts in kinds.items()}
            if any(map(any, changed.values())):
                actors[name] = changed
        return {"seconds": round(now.time - before.time, 1), "actors": actors}

    def _before(self, now: _Record, seconds: float) -> _Record:
        """The latest record that is so old, or the oldest one."""
        old = [record for record in self._records if record.time <= now.time - seconds]
        return old[-1] if old else self._records[0]

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
