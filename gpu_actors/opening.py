"""Opening: a context that is made in a thread, on the way to the task that asked for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import anyio
import anyio.to_thread

__all__ = ["Opening", "in_thread"]

T = TypeVar("T")


class Closeable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closeable)


class Opening(Generic[C]):
    """A context that is being opened, and may be abandoned meanwhile."""

    def __init__(self, open_it: Callable[[], C]) -> None:
        self._open = open_it
        self._lock = threading.Lock()
        self._abandoned = False
        self._context: C | None = None

    def run(self) -> C:
        context = self._open()
        with self._lock:
            self._context = context
            abandoned = self._abandoned
        if abandoned:
            context.close()
        return context

    def abandon(self) -> None:
        """Close the context, or, if it is not open yet, close it on the opening thread once it is."""
        with self._lock:
            self._abandoned = True
            context = self._context
        if context is not None:
            context.close()


async def in_thread(function: Callable[[], T]) -> T:
    """Run a function in a thread of anyio's pool."""
    # With a limiter of its own: the loop's threads may all be waiting for replies that only closing would answer.
    return await anyio.to_thread.run_sync(function, limiter=anyio.CapacityLimiter(1))
