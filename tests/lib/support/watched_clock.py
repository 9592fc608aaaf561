"""Clocks that tell which threads sleep on them, so that a test knows when nothing more will happen at this time."""

from __future__ import annotations

import threading

from inside.package import SystemClock
from support.service import eventually

from gpu_actors.testing import MockClock

__all__ = ["WatchedClock", "WatchedSystemClock"]


class _Sleepers:
    """The time that each sleeping thread read before it fell asleep."""

    def __init__(self) -> None:
        self._read: dict[int, float] = {}

    def fall_asleep(self, now: float) -> None:
        self._read[threading.get_ident()] = now

    def wake(self) -> None:
        del self._read[threading.get_ident()]

    def since(self, now: float) -> list[int]:
        """The threads that fell asleep at that time or later."""
        return [thread for thread, read in self._read.copy().items() if read >= now]


class WatchedClock(MockClock):
    """A mock clock that can wait for its sleepers."""

    def __init__(self) -> None:
        super().__init__()
        self._asleep = _Sleepers()

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        self._asleep.fall_asleep(self.now())
        try:
            super().wait(condition, until)
        finally:
            self._asleep.wake()

    def advance_in_vain(self, seconds: float, sleepers: int = 1) -> None:
        """Advance when so many threads sleep, and return when so many have read the new time and sleep again."""
        eventually(lambda: len(self._asleep.since(self.now())) >= sleepers)
        self.advance(seconds)
        eventually(lambda: len(self._asleep.since(self.now())) >= sleepers)


class WatchedSystemClock(SystemClock):
    """The system's clock, and how many threads sleep on it."""

    def __init__(self) -> None:
        self._asleep = _Sleepers()

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        self._asleep.fall_asleep(self.now())
        try:
            super().wait(condition, until)
        finally:
            self._asleep.wake()

    @property
    def sleepers(self) -> int:
        return len(self._asleep.since(0.0))
