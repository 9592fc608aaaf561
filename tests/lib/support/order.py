"""A stand-in for an actor's cell, for tests of the order of a cache's calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from inside.runtime import Mailbox

from gpu_actors import Call


class Cell:
    """The part of a cell that a KvOrder needs."""

    def __init__(self) -> None:
        self.mailbox = Mailbox("test", 100, 8)

    def call(self, priority: int = 0, cache: int = 1, message: Any = None) -> Call[Any]:
        """A call for a cache, or with this message, that was taken from the mailbox."""
        call: Call[Any] = Call(message or SimpleNamespace(cache=cache), self.mailbox, priority)
        self.mailbox.put(call)
        assert self.taken() == [call]
        return call

    def taken(self) -> list[Call[Any]]:
        with self.mailbox.lock:
            return self.mailbox._pop(100)

    def flush_requested(self) -> bool:
        """Whether the actor is to flush."""
        return self.mailbox._flush_requested
