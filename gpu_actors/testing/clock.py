"""MockClock: a clock that moves only when a test advances it."""

from __future__ import annotations

import math
import threading

__all__ = ["MockClock"]


class MockClock:
    """A clock for ``ContextOptions(clock=...)`` that stands still between calls of `advance`.

    Deadlines, backoff, injected delays and latencies all follow it, so a test of a simulated hour takes no time.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._lock = threading.Lock()
        self._sleepers: dict[threading.Condition, int] = {}

    def now(self) -> float:
        """Seconds on this clock."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Advance the clock, and wake the threads that sleep on it."""
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds={seconds!r}: a clock only moves forward, by a finite time")
        with self._lock:
            self._now += seconds
            sleepers = list(self._sleepers)
        for condition in sleepers:
            with condition:
                condition.notify_all()

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        """Sleep on a held condition until it is notified or the clock has moved."""
        with self._lock:
            if until is not None and self._now >= until:
                return
            self._sleepers[condition] = self._sleepers.get(condition, 0) + 1
        try:
            condition.wait()
        finally:
            with self._lock:
                count = self._sleepers.pop(condition) - 1
                if count:
                    self._sleepers[condition] = count
