"""As much of an actor's cell as the order of a cache's calls needs."""

from __future__ import annotations

from typing import Any

from gpu_actors.runtime.call import Call
from gpu_actors.runtime.mailbox import Mailbox


class Cell:
    """As much of one as a gate needs."""

    def __init__(self) -> None:
        self.mailbox = Mailbox("test", 100, 8)

    def park(self, call: Call[Any]) -> None:
        self.mailbox.park(call)

    def call(self, priority: int = 0) -> Call[Any]:
        """A call that was taken from the mailbox."""
        call: Call[Any] = Call("message", self.mailbox, priority)
        self.mailbox.put(call)
        assert self.taken() == [call]
        return call

    def taken(self) -> list[Call[Any]]:
        with self.mailbox.lock:
            return self.mailbox._pop(100)
