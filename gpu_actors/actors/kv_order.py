"""KvOrder: keeps the calls on each sequence in order while one waits for a kernel, a step, or the end of a launch."""

from __future__ import annotations

from typing import Any

from gpu_actors.kv.requests import CreateSequence, ImportSequence, KvSequence
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.cell import ActorCell

__all__ = ["KvOrder"]


class KvOrder:
    """Parks calls that must wait, and later calls on the same sequences. More urgent calls pass.

    Only the thread that does the actor's work uses it; any thread may call `look_again`. Only `release` gives calls
    back to the mailbox, when the actor has no calls in hand. So no parked call is overtaken by a call that the actor
    took earlier. The order and its parked calls outlive the incarnations of the actor.
    """

    def __init__(self, cell: ActorCell) -> None:
        self._cell = cell
        self._blockers: list[Call[Any]] = []  # wait for a kernel; the KernelStore parks them
        self._parked: list[Call[Any]] = []
        self._due = False

    def admits(self, call: Call[Any]) -> bool:
        """Whether a call may be handled now. If not, the call is parked, and comes back later."""
        if call in self._blockers:
            self._blockers.remove(call)
            self.look_again()
        if any(self._goes_before(other, call) for other in (*self._blockers, *self._parked)):
            self.hold(call)
            return False
        return True

    def block(self, call: Call[Any]) -> None:
        """Make later calls wait until ``call``, which the KernelStore parks, comes back or is answered."""
        self._blockers.append(call)
        call.when_done(lambda _: self.look_again())

    def hold(self, call: Call[Any]) -> None:
        """Park a call until something that it waits for has ended. Later calls on its sequences wait too."""
        self._cell.mailbox.park(call)
        self._parked.append(call)

    def look_again(self) -> None:
        """Note that something has ended that a call may wait for. Any thread may call it."""
        # In this order: the actor parks a call before it asks in `release` whether something has ended.
        self._due = True
        if self._parked:
            self._cell.mailbox.request_flush()

    def release(self) -> None:
        """Give the parked calls back to the mailbox, in their order, if what they wait for may have ended."""
        if self._due:
            self._due = False
            self._blockers = [call for call in self._blockers if not call.done]
            parked, self._parked = self._parked, []
            if parked:
                self._cell.mailbox.requeue(parked)

    def _goes_before(self, call: Call[Any], other: Call[Any]) -> bool:
        """Whether the mailbox gives out ``call`` before ``other``, and the two share a sequence."""
        rank = self._cell.mailbox.rank
        if call.done or call.message.cache != other.message.cache or rank(call) >= rank(other):
            return False
        ours, others = _numbers(call.message), _numbers(other.message)
        return ours is None or others is None or not ours.isdisjoint(others)


def _numbers(message: Any) -> set[int] | None:
    """The numbers of the sequences that a message is about. None: all sequences of its cache."""
    if isinstance(message, CreateSequence | ImportSequence):
        return set()
    seqs = getattr(message, "seqs", getattr(message, "seq", None))
    if seqs is None:
        return None
    return {seq.number for seq in (seqs if isinstance(seqs, list | tuple) else (seqs,)) if isinstance(seq, KvSequence)}
