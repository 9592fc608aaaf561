"""Outbox: answers on their way back to event loops, one wake-up a loop a batch.

Waking a loop costs a system call and a trip through its selector, far more than resolving a future. An actor thread
therefore settles a whole batch of calls first and wakes each waiting loop once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from gpu_actors.actors.waiter import Waiter

__all__ = ["Outbox"]


class Outbox:
    """Collects waiters to wake. Belongs to one thread; `flush` before that thread sleeps."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []

    def add(self, waiters: Iterable[Waiter]) -> None:
        """Wake these at the next flush."""
        self._waiters.extend(waiters)

    def flush(self) -> None:
        """Wake every collected waiter, with one call into each loop."""
        waiters = self._waiters
        if not waiters:
            return
        self._waiters = []
        if len(waiters) == 1:
            _call(waiters[0].loop, waiters[0].wake)
            return
        for loop in {waiter.loop for waiter in waiters}:
            _call(loop, _wake, deque([waiter for waiter in waiters if waiter.loop is loop]))


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        # The loop was closed while its requests were in flight. Nobody is left to wake; the answers stay on the calls
        # for whoever holds the replies.
        return


def _wake(waiters: deque[Waiter]) -> None:
    if len(waiters) > 1:
        # A task that raises what ends the loop, or runs the loop from within, must not keep the others from going on.
        waiters[0].loop.call_soon(_wake, waiters)
    while waiters:
        waiters.popleft().wake()
