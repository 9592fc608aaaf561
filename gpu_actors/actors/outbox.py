"""Outbox: answers on their way back to event loops, one wake-up a loop a batch.

Waking a loop costs a system call and a trip through its selector, far more than resolving a future. An actor thread
therefore settles a whole batch of calls first and wakes each waiting loop once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

__all__ = ["Outbox"]


class Outbox:
    """Collects futures to wake. Belongs to one thread; `flush` before that thread sleeps."""

    __slots__ = ("_by_loop",)

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}

    def add(self, future: asyncio.Future[None]) -> None:
        """Wake this future at the next flush."""
        loop = future.get_loop()
        futures = self._by_loop.get(loop)
        if futures is None:
            self._by_loop[loop] = [future]
        else:
            futures.append(future)

    def flush(self) -> None:
        """Wake every collected future, with one call into each loop."""
        if not self._by_loop:
            return
        by_loop, self._by_loop = self._by_loop, {}
        for loop, futures in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake, futures)
            except RuntimeError:
                # The loop was closed while its requests were in flight. Nobody is left to wake; the answers stay
                # on the calls for whoever holds the replies.
                continue


def _wake(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
