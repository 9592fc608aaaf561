"""SingleFlight: one thread computes what many ask for at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from typing import Generic, TypeVar

__all__ = ["SingleFlight"]

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class SingleFlight(Generic[Key, Value]):
    """Joins concurrent calls for equal keys. It remembers nothing: a later call computes again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flights: dict[Key, Future[Value]] = {}

    def run(self, key: Key, make: Callable[[], Value]) -> Value:
        """make() in the thread that leads; the leader's value in those that joined it.

        What ``make`` raises is raised to all. Where the leading thread is interrupted (KeyboardInterrupt,
        SystemExit), which says nothing about the key, a thread that waits leads instead.
        """
        while True:
            with self._lock:
                flight = self._flights.get(key)
                leads = flight is None
                if flight is None:
                    flight = self._flights[key] = Future()
            if leads:
                return self._lead(key, flight, make)
            try:
                return flight.result()
            except CancelledError:
                if not flight.cancelled():  # the leader's own error rather than its interruption
                    raise

    def _lead(self, key: Key, flight: Future[Value], make: Callable[[], Value]) -> Value:
        # A caller that asks after it has landed computes again.
        def land() -> None:
            with self._lock:
                del self._flights[key]

        try:
            value = make()
        except BaseException as error:
            land()
            if isinstance(error, Exception):
                flight.set_exception(error)
            else:
                flight.cancel()
            raise
        land()
        flight.set_result(value)
        return value
