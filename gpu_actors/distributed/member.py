"""Member: one worker of a pool, and its load."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.handles.health import Health
from gpu_actors.runtime.reply import Reply

__all__ = ["Member", "WorkerStats"]

# Seconds for which the health of a ready worker is cached: reading it costs more than choosing between two workers.
_HEALTH_TTL = 0.02


class WorkerStats(NamedTuple):
    """Counts of one worker.

    outstanding: requests without an answer.
    sequences: sequences that live on it.
    requests: all requests so far.
    generation: 1 at first, and one more after each loss.
    leaving: whether it is being removed, so that it gets no new requests.
    """

    outstanding: int
    sequences: int
    requests: int
    generation: int
    leaving: bool


class Member:
    """A context in a pool. owned: whether the pool closes it."""

    def __init__(self, name: str, context: GpuContext, owned: bool) -> None:
        self.name = name
        self.context = context
        self.owned = owned
        self.leavers: int = 0  # tasks that remove it from the pool
        self.outstanding: int = 0
        self.requests: int = 0
        self._sequences: dict[int, int] = {}  # by the generation that has them
        self._lock = threading.RLock()  # re-entrant: a finalizer may free a sequence
        self._health_time = -1.0
        self._health: Health | None = None

    @property
    def sequences(self) -> int:
        """How many sequences live in the current generation."""
        return self._sequences.get(self.context.generation, 0)

    @property
    def leaving(self) -> bool:
        """Whether it is being removed, so that it gets no new requests."""
        return self.leavers > 0

    @property
    def idle(self) -> bool:
        return not self.outstanding and not self.sequences

    def health(self) -> Health:
        """The context's health, at most `_HEALTH_TTL` seconds old if it was ready."""
        now = time.monotonic()
        health = self._health
        if health is None or now - self._health_time > _HEALTH_TTL or not health.ready or health.state != "ready":
            health = self._health = self.context.health()
            self._health_time = now
        return health

    def stats(self) -> WorkerStats:
        return WorkerStats(self.outstanding, self.sequences, self.requests, self.context.generation, self.leaving)

    def began(self, reply: Reply[Any]) -> None:
        """Count a request until it has its answer, even if no task waits for it."""
        with self._lock:
            self.outstanding += 1
            self.requests += 1
        reply._call.when_done(self._answered)

    def housed(self, generation: int, change: int) -> None:
        """Add ``change``, which may be negative, to the number of sequences of a generation."""
        with self._lock:
            now = self.context.generation
            counts = self._sequences
            counts[generation] = counts.get(generation, 0) + change
            for old in [number for number in counts if number < now]:
                del counts[old]

    def _answered(self, _: Any) -> None:
        with self._lock:
            self.outstanding -= 1
