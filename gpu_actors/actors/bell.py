"""Bell: how an actor thread sleeps until somebody has work for it.

A pipe and not a lock: writing to one tells the scheduler that the writer is about to wait, which lets the woken thread
run where its work is still warm in the cache; and the write lets go of the GIL, which a thread woken by a lock finds
taken, to be put to sleep a second time.
"""

from __future__ import annotations

import os
import weakref

__all__ = ["Bell"]


class Bell:
    """One thread sleeps in `wait`, any other wakes it with `ring`.

    A ring is not lost when nobody waits yet, and a wait may end without a ring: look for work after it. Raises OSError
    where the process has no file descriptors left. The descriptors are closed with the last reference.
    """

    __slots__ = ("__weakref__", "_reader", "_writer")

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        # Not when the interpreter exits: a daemon thread may still sleep here.
        weakref.finalize(self, _close, self._reader, self._writer).atexit = False

    def wait(self) -> None:
        """Sleep until the next ring."""
        os.read(self._reader, 4096)

    def ring(self) -> None:
        os.write(self._writer, b"\0")


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
