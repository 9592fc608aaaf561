"""A network of two channels in one process that reorders, doubles, delays and drops what it carries."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

from inside.isolation import Link


class BadChannel:
    """One way of it. What is posted waits until the test delivers."""

    def __init__(self, network: BadNetwork) -> None:
        self._network = network
        self.link: Link | None = None
        self.forgotten: list[int] = []

    def pack(self, record: Any, about: int = 0) -> Any:
        return record

    def post(self, sequence: int, parcel: Any) -> None:
        self._network.post(self, sequence, parcel)

    def forget(self, about: int) -> None:
        self.forgotten.append(about)

    @property
    def waiting(self) -> int:
        return 0


class BadNetwork:
    """double, drop: probabilities of a record. delay: of not being delivered in a turn."""

    def __init__(self, seed: int, double: float = 0.2, drop: float = 0.0, delay: float = 0.5) -> None:
        self._random = random.Random(seed)
        self.double, self.drop, self.delay = double, drop, delay
        self._lock = threading.Lock()
        self._flying: list[tuple[BadChannel, int, Any]] = []
        self.doubled = self.dropped = self.overtaken = 0

    def post(self, channel: BadChannel, sequence: int, parcel: Any) -> None:
        with self._lock:
            if self._random.random() < self.drop:
                self.dropped += 1
                return
            self._flying.append((channel, sequence, parcel))
            if self._random.random() < self.double:
                self.doubled += 1
                self._flying.append((channel, sequence, parcel))

    def deliver(self, receiver: Callable[[BadChannel], Link]) -> None:
        """One turn: hand over some of what flies, in any order."""
        with self._lock:
            flying, self._flying = self._flying, []
            now = [each for each in flying if self._random.random() >= self.delay]
            self._flying = [each for each in flying if each not in now]
            before = list(now)
            self._random.shuffle(now)
            self.overtaken += before != now
        for channel, sequence, parcel in now:
            receiver(channel).received(sequence, parcel)
