"""Opening: a context that is made in a thread, on the way to the task that asked for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

import anyio
import anyio.to_thread

from gpu_actors.errors import GpuActorsError

__all__ = ["Opening", "in_thread", "to_the_end"]

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

    def abandon(self) -> C | None:
        """Have the opening thread close the context once it is open. Gives the context if it is open already: the
        caller closes it."""
        with self._lock:
            self._abandoned = True
            return self._context


async def to_the_end(work: Coroutine[Any, Any, object]) -> None:
    """Do this even if the task that waits for it is cancelled, once more or while it waits."""
    await asyncio.shield(asyncio.create_task(work))


async def in_thread(function: Callable[[], T]) -> T:
    """Run a function in a thread of anyio's pool. Raises GpuActorsError if there is none and none can be started."""
    begun = False

    def run() -> T:
        nonlocal begun
        begun = True
        return function()

    try:
        # With a limiter of its own: the loop's threads may all be waiting for replies that only closing would answer.
        return await anyio.to_thread.run_sync(run, limiter=anyio.CapacityLimiter(1))
    except RuntimeError as error:
        if begun:
            raise
        raise GpuActorsError(f"no thread can be started: {error}") from error
