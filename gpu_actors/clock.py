"""The clock that the actors read, so that a test can control time.

Deadlines, restart backoff, injected delays and the hang check all read a `Clock`. `SystemClock` is
``time.monotonic``, which is also what ``anyio.current_time()`` shows on asyncio; `gpu_actors.testing.MockClock` moves
only when told to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["SYSTEM_CLOCK", "TIMER_SLACK", "Clock", "SystemClock"]

TIMER_SLACK = 0.002
"""Seconds by which a loop whose timers count milliseconds may cancel before a deadline."""


class Clock(Protocol):
    """A monotonic clock that a thread can also sleep on."""

    def now(self) -> float:
        """Seconds on this clock."""
        ...

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        """Sleep on a held condition until it is notified or the clock reads ``until`` (None: no limit).

        May return early; callers test their predicate again.
        """
        ...


class SystemClock:
    """``time.monotonic``."""

    now: Callable[[], float] = staticmethod(time.monotonic)

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        if until is None:
            condition.wait()
        else:
            condition.wait(min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX))


SYSTEM_CLOCK = SystemClock()
