"""Leaving slowly: after SIGTERM /readyz says so for a while before the server stops to listen.

What has not begun by then is answered at once (`Farewell`), for another server may begin it.
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
    """Waits that end once the server leaves. For the tasks of one event loop."""

    def __init__(self) -> None:
        self._left = False
        self._waits: set[anyio.CancelScope] = set()

    def leave(self) -> None:
        """End every wait with `ActorStopped`."""
        self._left = True
        for scope in self._waits:
            scope.cancel()

    @contextmanager
    def waiting(self, grace: float = 0.0) -> Iterator[None]:
        """Wait inside of this. What need not wait goes on, also once the server leaves.

        grace: seconds for which a wait that begins later may last. Raises `ActorStopped` for a wait that was ended.
        """
        with anyio.CancelScope() as scope:
            if self._left:
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
    """While entered: on SIGTERM have `Probes.leave` said, and hand the signal on once ``seconds`` have passed.

    Load balancers have that time to ask /readyz. A second SIGTERM is handed on at once. Enter it on the thread of the
    server's event loop. Does nothing off the main thread, and where nothing in Python handles SIGTERM.
    """
    former: Any = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or not callable(former):
        yield
        return
    leaving = _Leaving(probes, seconds, former)
    signal.signal(signal.SIGTERM, leaving)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is leaving:
            while isinstance(former, _Leaving) and former.over:  # its event loop may be closed
                former = former._former
            signal.signal(signal.SIGTERM, former)
        leaving.over = True


class _Leaving:
    """A handler of SIGTERM. Several applications of one process chain theirs; all of them leave at once."""

    def __init__(self, probes: Probes, seconds: float, former: Any) -> None:
        self._probes = probes
        self._seconds = seconds
        self._former = former
        self._loop = asyncio.get_running_loop()
        self.over = False

    def __call__(self, number: int, _: FrameType | None) -> None:
        seconds, last = 0.0, self
        for leaving in self._chain():
            last = leaving
            if not leaving.over:
                leaving._probes.leave()
                seconds = max(seconds, leaving._seconds)
        hand_on = last._former
        signal.signal(signal.SIGTERM, hand_on)
        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, hand_on, number, None)

    def _chain(self) -> Iterator[_Leaving]:
        leaving: Any = self
        while isinstance(leaving, _Leaving):
            yield leaving
            leaving = leaving._former
