"""Opening: a context that a thread opens for a task, and that is closed if the task is cancelled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

import anyio
import anyio.to_thread

from gpu_actors.catching import hand_error_to
from gpu_actors.errors import GpuActorsError

__all__ = ["Opening", "run_in_thread", "start_thread"]

T = TypeVar("T")


class Closeable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closeable)


class Opening(Generic[C]):
    """A context that is being opened. The task that waits for it may abandon it."""

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
        """Make the opening thread close the context once it is open.

        If the context is open already, returns it. The caller must then close it.
        """
        with self._lock:
            self._abandoned = True
            return self._context


def start_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Run a function in a daemon thread, and return its future. The process may end without waiting for the thread."""
    future: Future[T] = Future()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            with hand_error_to(future.set_exception):
                future.set_result(function())

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def run_in_thread(function: Callable[[], T]) -> T:
    """Run a function in a thread of anyio's pool. Raises GpuActorsError if no thread can be started."""
    started = False

    def run() -> T:
        nonlocal started
        started = True
        return function()

    try:
        # Its own limiter: all threads of the loop's limiter may wait for replies that only closing would answer.
        return await anyio.to_thread.run_sync(run, limiter=anyio.CapacityLimiter(1))
    except RuntimeError as error:
        if started:
            raise
        raise GpuActorsError(f"no thread can be started: {error}") from error
