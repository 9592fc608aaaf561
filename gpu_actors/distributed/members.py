"""Member: one worker of a pool, and what it has to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from gpu_actors.handles.gpu_context import GpuContext
from gpu_actors.handles.health import Health
from gpu_actors.runtime.reply import Reply

__all__ = ["Member", "WorkerStats"]

# Seconds for which a look at a healthy worker holds: it costs more than the choice between two.
_LOOK = 0.02


class WorkerStats(NamedTuple):
    """Of one worker. outstanding: its requests without an answer. sequences: that live there. requests: so far.

    generation: 1, and one more after each loss. leaving: it gets nothing new.
    """

    outstanding: int
    sequences: int
    requests: int
    generation: int
    leaving: bool


class Member:
    """A context in a pool. owned: the pool opened it, and closes it."""

    def __init__(self, name: str, context: GpuContext, owned: bool) -> None:
        self.name = name
        self.context = context
        self.owned = owned
        self.leavers: int = 0  # tasks that take it out of the pool
        self.outstanding: int = 0
        self.requests: int = 0
        self._sequences: dict[int, int] = {}  # by the generation that has them
        self._lock = threading.RLock()  # a finalizer may free a sequence
        self._watchers: list[Callable[[], None]] = []
        self._looked = -1.0
        self._health: Health | None = None

    @property
    def sequences(self) -> int:
        """Sequences that live in the generation there is now."""
        return self._sequences.get(self.context.generation, 0)

    @property
    def leaving(self) -> bool:
        """Whether it gets nothing new."""
        return self.leavers > 0

    @property
    def idle(self) -> bool:
        return not self.outstanding and not self.sequences

    def health(self) -> Health:
        """How the context was a moment ago, at most `_LOOK` seconds where it was ready."""
        now = time.monotonic()
        health = self._health
        if health is None or now - self._looked > _LOOK or not health.ready or health.state != "ready":
            health = self._health = self.context.health()
            self._looked = now
        return health

    def stats(self) -> WorkerStats:
        return WorkerStats(self.outstanding, self.sequences, self.requests, self.context.generation, self.leaving)

    def began(self, reply: Reply[Any]) -> None:
        """A request was made: it counts until it has its answer, even if no task waits for that."""
        with self._lock:
            self.outstanding += 1
            self.requests += 1
        reply._call.when_done(self._answered)

    def housed(self, generation: int, change: int) -> None:
        """So many sequences more, or fewer, live in a generation."""
        with self._lock:
            now = self.context.generation
            counts = self._sequences
            counts[generation] = counts.get(generation, 0) + change
            for old in [number for number in counts if number < now]:
                del counts[old]
        self._tell()

    def watch(self, callback: Callable[[], None]) -> None:
        """Call this, on any thread, whenever the member may have become idle."""
        with self._lock:
            self._watchers.append(callback)

    def forget_watcher(self, callback: Callable[[], None]) -> None:
        with self._lock:
            self._watchers.remove(callback)

    def _answered(self, _: Any) -> None:
        with self._lock:
            self.outstanding -= 1
        self._tell()

    def _tell(self) -> None:
        for callback in list(self._watchers):
            callback()
