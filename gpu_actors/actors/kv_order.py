"""Gate: keeps the calls of one cache in order when one of them cannot go on, or has to come again.

A call waits that needs a kernel which is being compiled, or a sequence that is still in use. A call comes again whose
launch failed or saw rows that were never written. Whatever was asked for later waits behind it; calls of other caches
pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gpu_actors.runtime.call import Call

if TYPE_CHECKING:
    from gpu_actors.runtime.cell import ActorCell

__all__ = ["Gate"]


class Gate:
    """`admits`, `block` and `hold` are for the actor's thread, the others for any.

    A call may be cancelled at any moment, by the garbage collector in the middle of all this, too, and on a thread that
    holds the mailbox's lock: so the lock is re-entrant, the mailbox's is never asked for under it, and a call that was
    put aside looks again for what stood in its way.

    Held calls are parked here. Expected ones are in flight, and when their launch ends they come again or are answered;
    returning ones are in the mailbox again, or about to be.
    """

    def __init__(self, cell: ActorCell) -> None:
        self._cell = cell
        self._lock = threading.RLock()
        self._blocker: Call[Any] | None = None
        self._held: list[Call[Any]] = []
        self._expected: set[Call[Any]] = set()
        self._returning: set[Call[Any]] = set()

    def admits(self, call: Call[Any]) -> bool:
        """Whether a call may be handled now. False: it will come again."""
        with self._lock:
            for awaited in (self._expected, self._returning):
                awaited.difference_update([other for other in list(awaited) if other is call or other.done])
            waits = self._in_the_way(call)
            behind = _behind(call, self._returning)
        if waits:
            self._keep(call)
            return False
        self.open(call)
        if behind:
            # It was taken together with one of those; the mailbox will give it out after them.
            self._cell.mailbox.give_back((call,))
        return not behind

    def block(self, call: Call[Any]) -> None:
        """Make everything wait until this call comes again or is answered. Somebody else parks it."""
        with self._lock:
            self._blocker = call
        call.when_done(self.open)

    def hold(self, call: Call[Any]) -> None:
        """Let this call and everything behind it wait until something in flight has ended."""
        self._cell.mailbox.park(call)
        with self._lock:
            self._expected.add(call)
            self._held.append(call)

    def expect(self, calls: Iterable[Call[Any]]) -> None:
        """These are in flight and may come again."""
        with self._lock:
            self._expected.update(calls)

    def returned(self, calls: Iterable[Call[Any]]) -> None:
        """These come again now."""
        self._return(calls)

    def settle(self, ended: Iterable[Call[Any]] = ()) -> None:
        """Something in flight has ended: let those that wait look again."""
        with self._lock:
            self._expected.difference_update(ended)
        if self._held:
            self._release()

    def open(self, call: Call[Any]) -> None:
        """If this is the call that was blocked, let those that wait behind it come again, in their order."""
        opened = False
        try:
            with self._lock:
                if call is not self._blocker:
                    return
                self._blocker = None
                opened = True
            self._release()
        except BaseException:  # Ctrl-C, where this thread is the one that answers the call
            if opened:
                self._release()
            raise

    def _in_the_way(self, call: Call[Any]) -> bool:
        """Whether there is something that a call has to wait for."""
        blocker = self._blocker
        return (blocker is not None and call is not blocker) or _behind(call, self._expected)

    def _keep(self, call: Call[Any]) -> None:
        self._cell.mailbox.park(call)
        with self._lock:
            self._held.append(call)
            waits = self._in_the_way(call)
        if not waits:  # it is gone meanwhile, and with it whoever would let this one go on
            self._release()

    def _release(self) -> None:
        held: list[Call[Any]] = []
        try:
            with self._lock:
                held, self._held = self._held, []
                self._return(held)
            if held:
                self._cell.mailbox.give_back(held)
        except BaseException:  # Ctrl-C
            kept = [call for call in held if call.parked]
            self._return(kept)
            self._cell.mailbox.give_back(kept)
            raise

    def _return(self, calls: Iterable[Call[Any]]) -> None:
        with self._lock:
            self._expected.difference_update(calls)
            self._returning.update(calls)


def _behind(call: Call[Any], others: Iterable[Call[Any]]) -> bool:
    place = _place(call)
    return any(_place(other) < place for other in list(others))


def _place(call: Call[Any]) -> tuple[int, int]:
    """The order in which the mailbox gives calls out."""
    return -call.priority, call.number
