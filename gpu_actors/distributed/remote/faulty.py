"""Faulty: a launcher in this process whose channels reorder, double, delay and drop records. For tests."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

from gpu_actors.distributed.remote.direct import DirectChannel, Inbox, InProcess, ThreadConnection
from gpu_actors.isolation.launcher import Received, WorkerSpec

__all__ = ["Faults", "Faulty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """The faults of a channel. Delays differ, so that records overtake each other.

    seed: the seed of the random generator.
    double, drop: the probabilities that a record is doubled or dropped.
    delay: the longest delay of a record, in seconds.
    """

    seed: int = 0
    double: float = 0.2
    drop: float = 0.0
    delay: float = 0.003


class Faulty(InProcess):
    """`InProcess` over bad channels, in both directions.

    patience: seconds for which a record may be missing before its generation is lost.
    doubled, dropped, overtaken: how many records were, so far.
    """

    def __init__(self, faults: Faults | None = None, *, patience: float = 5.0) -> None:
        self.faults: Faults = faults if faults is not None else Faults()
        self.patience = patience
        self.doubled = self.dropped = self.overtaken = 0
        self._random = random.Random(self.faults.seed)
        self._lock = threading.RLock()

    def start(self, order: WorkerSpec, received: Received) -> ThreadConnection:
        return ThreadConnection(order, received, lambda inbox: _FaultyChannel(self, inbox))

    def throw(self) -> list[float]:
        """Draw the delays with which a record arrives: none if it is dropped, two if it is doubled."""
        faults, generator = self.faults, self._random
        with self._lock:
            if generator.random() < faults.drop:
                self.dropped += 1
                return []
            copies = 1 + (generator.random() < faults.double)
            self.doubled += copies - 1
            return [generator.random() * faults.delay for _ in range(copies)]


class _FaultyChannel(DirectChannel):
    def __init__(self, faulty: Faulty, inbox: Inbox) -> None:
        super().__init__(inbox)
        self._faulty = faulty
        self._flying: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition(threading.RLock())
        self._newest = 0
        threading.Thread(target=self._deliver, name="gpu-actors-faulty", daemon=True).start()

    def post(self, sequence: int, parcel: Any) -> None:
        now = time.monotonic()
        with self._changed:
            for delay in self._faulty.throw():
                heapq.heappush(self._flying, (now + delay, next(self._numbers), (sequence, parcel)))
            self._changed.notify()

    @property
    def waiting(self) -> int:
        return len(self._flying)

    def _deliver(self) -> None:
        while not self.cut:
            with self._changed:
                if not self._flying:
                    self._changed.wait(0.1)
                    continue
                due = self._flying[0][0] - time.monotonic()
                if due > 0:
                    self._changed.wait(due)
                    continue
                _, _, (sequence, parcel) = heapq.heappop(self._flying)
                self._faulty.overtaken += sequence < self._newest
                self._newest = max(self._newest, sequence)
            super().post(sequence, parcel)
