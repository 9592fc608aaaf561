"""Meter: histograms of how long an actor's requests take and of how many share a launch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from gpu_actors.clock import Clock
from gpu_actors.errors import RequestCancelled
from gpu_actors.runtime.call import DONE, Call

__all__ = ["SECONDS", "Histogram", "Meter", "outcome_of"]

SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of histograms of times, in seconds."""

_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Histogram:
    """Counts of values by upper bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds: tuple[float, ...] = tuple(bounds)
        self.total: float = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def counts(self) -> list[int]:
        """The number of values between each bound and the one below it, followed by the number above all bounds."""
        return list(self._counts)

    def cumulative(self) -> list[int]:
        """The number of values up to each bound, followed by the number of all values."""
        return list(accumulate(self._counts))


class Meter:
    """Times the calls of one mailbox. The mailbox calls the meter under its lock.

    latency: seconds from acceptance to the answer, by outcome.
    queue: seconds from acceptance to the first launch.
    launch: seconds from the first launch to the answer.
    batch: requests that one launch answers.
    """

    def __init__(self, clock: Clock) -> None:
        outcomes = ("completed", "failed", "cancelled")
        self.latency: dict[str, Histogram] = {outcome: Histogram(SECONDS) for outcome in outcomes}
        self.queue: Histogram = Histogram(SECONDS)
        self.launch: Histogram = Histogram(SECONDS)
        self.batch: Histogram = Histogram(_REQUESTS)
        self._clock = clock
        self._accepted: dict[int, float] = {}
        self._launched: dict[int, float] = {}

    def accepted(self, call: Call[Any]) -> None:
        self._accepted[call.number] = self._clock.now()
        if call.state is DONE:  # it was answered meanwhile
            self._accepted.pop(call.number, None)

    def launched(self, calls: Sequence[Call[Any]]) -> None:
        now = self._clock.now()
        self.batch.observe(len(calls))
        for call in calls:
            since = self._accepted.get(call.number)
            if since is not None and call.number not in self._launched:
                self.queue.observe(now - since)
                self._launched[call.number] = now

    def answered(self, call: Call[Any]) -> None:
        now = self._clock.now()
        launched, accepted = self._launched.pop(call.number, None), self._accepted.pop(call.number, None)
        if launched is not None:
            self.launch.observe(now - launched)
        if accepted is not None:
            self.latency[outcome_of(None if call.error is None else type(call.error))].observe(now - accepted)


def outcome_of(error: type[BaseException] | None) -> str:
    """How a request with an error of this type ended: "completed", "failed" or "cancelled"."""
    if error is None:
        return "completed"
    return "cancelled" if issubclass(error, RequestCancelled) else "failed"
