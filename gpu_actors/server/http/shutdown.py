"""Graceful shutdown: after SIGTERM /readyz is 503 for a while before the server stops listening.

Requests that have not begun by then are refused at once (`Farewell`), since another server may take them.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import anyio

from gpu_actors.errors import ActorStopped

if TYPE_CHECKING:
    from gpu_actors.server.http.probes import Probes

__all__ = ["Farewell", "leave_slowly"]


class Farewell:
    """Waits that end when the server shuts down. Only the tasks of one event loop may use it."""

    def __init__(self) -> None:
        self._shutting_down = False
        self._waits: set[anyio.CancelScope] = set()

    def leave(self) -> None:
        """End every wait with `ActorStopped`."""
        self._shutting_down = True
        for scope in self._waits:
            scope.cancel()

    @contextmanager
    def waiting(self, grace: float = 0.0) -> Iterator[None]:
        """Enter this around a wait that a shutdown should end. Code inside that does not wait goes on.

        grace: seconds that a wait may last if it begins during the shutdown.

        Raises `ActorStopped` if a shutdown ended the wait.
        """
        with anyio.CancelScope() as scope:
            if self._shutting_down:
                scope.deadline = anyio.current_time() + grace
            self._waits.add(scope)
            try:
                yield
            finally:
                self._waits.discard(scope)
        if scope.cancelled_caught:
            raise ActorStopped("the server is stopping, and this request was not begun")


@contextmanager
def leave_slowly(probes: Probes, seconds: float) -> Iterator[None]:
    """While this is entered, SIGTERM calls `Probes.leave`, and goes to its former handler after ``seconds``.

    In that time load balancers can ask /readyz. A second SIGTERM is forwarded at once. Enter it on the thread of the
    server's event loop. Does nothing outside the main thread, or if no Python code handles SIGTERM.
    """
    previous: Any = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    handler = _SigtermHandler(probes, seconds, previous)
    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handler:
            while isinstance(previous, _SigtermHandler) and previous.over:  # its event loop may be closed
                previous = previous._previous
            signal.signal(signal.SIGTERM, previous)
        handler.over = True


class _SigtermHandler:
    """A handler of SIGTERM. The handlers of several applications in one process form a chain; all leave at once."""

    def __init__(self, probes: Probes, seconds: float, previous: Any) -> None:
        self._probes = probes
        self._seconds = seconds
        self._previous = previous
        self._loop = asyncio.get_running_loop()
        self.over = False

    def __call__(self, number: int, _: FrameType | None) -> None:
        seconds, last = 0.0, self
        for handler in self._chain():
            last = handler
            if not handler.over:
                handler._probes.leave()
                seconds = max(seconds, handler._seconds)
        forward = last._previous
        signal.signal(signal.SIGTERM, forward)
        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, forward, number, None)

    def _chain(self) -> Iterator[_SigtermHandler]:
        handler: Any = self
        while isinstance(handler, _SigtermHandler):
            yield handler
            handler = handler._previous
