"""Mailbox: the bounded queue in front of an actor, and the account of every call that passed through it.

It outlives the actor: a restarted actor finds the calls that its predecessor left, and references stay valid. It
never blocks a sender. One lock guards it all: calls ordered by priority and age, their states and answers, the
number of launches in flight, and the sleeping actor thread, which is woken only when it sleeps.

The lock is re-entrant. Wherever a thread is, the garbage collector may just then end a task that waits for a reply,
which cancels its request, and a signal handler or a finalizer may do as much: all in the middle of what that thread
does here, lock or no lock. So nothing under the lock is decided on what a call in between may have changed.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

from gpu_actors.clock import Clock
from gpu_actors.errors import GpuActorsError, Overloaded
from gpu_actors.runtime.call import DONE, Call
from gpu_actors.runtime.meter import Meter, outcome_of
from gpu_actors.runtime.waking import Outbox, WakePipe

__all__ = ["ActorStats", "Mailbox"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorStats:
    """Counts since the context opened.

    submitted == completed + failed + cancelled + (queued or being worked on) + (in flight and unanswered).
    in_flight counts launches that have not finished, answered (by a deadline) or not. errors: requests answered with
    an error, by the name of its type; failed and cancelled together.
    """

    submitted: int
    launched: int
    completed: int
    failed: int
    cancelled: int
    in_flight: int
    queued: int
    requests_per_launch: float
    errors: Mapping[str, int] = field(hash=False)


class Mailbox:
    """Calls for one actor.

    capacity: calls that may wait, here, parked or gathered by the actor; a message whose type has ``frees_memory`` set
    is taken in beyond it, for what it gives back would be lost otherwise. max_in_flight: launches that may be
    unfinished; while so many are, the mailbox is ``saturated`` and `take` gives nothing out.
    """

    make_pipe: Callable[[], WakePipe] = WakePipe  # a process may have its actors sleep in another way

    def __init__(self, name: str, capacity: int, max_in_flight: int) -> None:
        self.name = name
        self.capacity = capacity
        self.max_in_flight = max_in_flight
        self.on_traced: Callable[[Call[Any]], None] | None = None
        self.lock: Any = threading.RLock()
        self.numbers: Iterator[int] = itertools.count(1)
        # The order in which calls go, by rank and number, and those that still wait. A call that is answered while
        # it waits, with the arrays in its message, is let go of at once; its place in the order is passed over later.
        self._order: list[tuple[int, int]] = []
        self._waiting: dict[int, Call[Any]] = {}
        self._parked = 0
        self._gathered = 0
        self._unanswered: set[Call[Any]] = set()
        self._submitted = self._launched = self._launched_calls = 0
        self.answered: defaultdict[type[BaseException] | None, int] = defaultdict(int)
        self.meter: Meter | None = None
        self._in_flight = 0
        self.saturated: bool = False
        self._closed: Callable[[], GpuActorsError] | None = None
        self._admitted: type | None = None
        self._written_off = False
        self._idle_callbacks: list[tuple[Callable[[], None], bool]] = []
        self._asleep = False
        self._flush_asked = False
        self._pipe: WakePipe | None = None

    # The sender's side

    def put(self, call: Call[Any]) -> None:
        """Queue a call, or answer it at once with `Overloaded` or the error that the mailbox was closed with."""
        refusal: GpuActorsError | None = None
        wake = False
        try:
            with self.lock:
                self._submitted += 1
                waiting = len(self._waiting) + self._parked + self._gathered
                if self._closed is not None and (self._admitted is None or type(call.message) is not self._admitted):
                    refusal = self._closed()
                elif waiting >= self.capacity and not getattr(type(call.message), "frees_memory", False):
                    refusal = Overloaded(f"{self.name} has {waiting} requests waiting, its mailbox is full")
                elif call.state is not DONE:
                    self._unanswered.add(call)
                    if self.meter is not None:
                        self.meter.accepted(call)
                    self._push(call)
                    wake, self._asleep = self._asleep, False
            if refusal is not None:
                call.fail(refusal)
            elif wake:
                self._wake()
        except BaseException:
            # Ctrl-C: the sender never learns of the call. Other senders rely on the actor, which must wake.
            if wake:
                self._wake()
            call.cancel()
            raise

    def close(self, reason: Callable[[], GpuActorsError], admit: type | None = None) -> None:
        """Refuse calls from now on with a fresh error from ``reason``. What is queued stays.

        admit: messages of this type are still taken in.
        """
        with self.lock:
            self._closed, self._admitted = reason, admit

    def fail_all(self, reason: Callable[[], GpuActorsError]) -> None:
        """Answer every unanswered call with an error, wherever it is: queued, held by the actor, or launched."""
        outbox = Outbox()
        try:
            self._fail_all(reason, outbox)
        except BaseException:  # Ctrl-C: go on with the others
            self._fail_all(reason, outbox)
            raise

    def _fail_all(self, reason: Callable[[], GpuActorsError], outbox: Outbox) -> None:
        with self.lock:
            calls = list(self._unanswered)
        for call in calls:
            call.fail(reason(), outbox)
        outbox.flush()

    def held(self, in_flight: Collection[Call[Any]]) -> list[Call[Any]]:
        """The unanswered calls that only the actor knows: it took them, and they are neither parked nor in flight."""
        with self.lock:
            held = [call for call in list(self._unanswered) if call.number not in self._waiting and not call.parked]
        return [call for call in held if call not in in_flight]

    def write_off(self) -> None:
        """Count launches as ended for those that wait in `when_idle`: they may never end."""
        with self.lock:
            self._written_off = True
        self.tell_idle()

    def abandon(self) -> None:
        """No actor will look here again: let go of what it slept by, however long the replies are kept."""
        self._pipe = None

    def after_fork(self, reason: Callable[[], GpuActorsError]) -> None:
        """Close the child process's copy, which has no actor, and answer its calls."""
        self.lock = threading.RLock()
        self._pipe, self._asleep = None, False  # the parent's actor sleeps by that one
        self.close(reason)
        self.fail_all(reason)
        self.write_off()

    def refuse(self, call: Call[Any], error: GpuActorsError) -> None:
        """Book a call and answer it with an error at once."""
        with self.lock:
            self._submitted += 1
        call.fail(error)

    def recall(self, _: Call[Any]) -> bool:
        """Cancel a call that is launched: False, it goes on."""
        return False

    def report(self, call: Call[Any]) -> None:
        """Tell the trace, and who waits for idleness, that a call has been answered. Without the lock."""
        if call.traced and self.on_traced is not None:
            self.on_traced(call)
        self.tell_idle()

    def tell_idle(self) -> None:
        """Call who waits in `when_idle`, where it is time."""
        while True:
            with self.lock:
                entry = self._due()
            if entry is None:
                return
            # The callback is forgotten after it was called, so that Ctrl-C in between calls it twice rather than never.
            entry[0]()
            with self.lock:
                if entry in self._idle_callbacks:
                    self._idle_callbacks.remove(entry)

    # The actor's side

    def take(self, controls: deque[Any], limit: int = 256) -> list[Call[Any]] | None:
        """Sleep until there is work and give it out, most urgent first; None if ``controls`` holds something.

        Empty where a flush was asked for (`ask_flush`) and no call waits.
        """
        while True:
            pipe = self._pipe = self._pipe or self.make_pipe()
            with self.lock:
                # Set before the look for work, so that a call which arrives after that wakes the thread.
                self._asleep = True
                if controls or ((self._waiting or self._flush_asked) and not self.saturated):
                    self._asleep = False
                    if controls:
                        return None
                    self._flush_asked = False
                    return self._pop(limit)
            pipe.wait()

    def give_back(self, calls: Iterable[Call[Any]]) -> None:
        """Queue calls again that were taken but not handled. They keep their place by age."""
        with self.lock:
            for call in calls:
                if call.state is not DONE and call.number not in self._waiting:
                    self._push(call)
                self._unpark(call)  # last: what is still parked may not have been given back
        self.nudge()

    def park(self, call: Call[Any]) -> None:
        """Note that the call is kept by something that outlives the actor. It still counts towards the capacity."""
        with self.lock:
            if call.state is not DONE and not call.parked:
                call.parked = True
                self._parked += 1

    def gather(self, count: int) -> None:
        """Note that the actor has so many calls now that it took and lets wait for others to share their launches."""
        self._gathered = count

    def ask_flush(self) -> None:
        """Have the actor flush as soon as another launch may begin, whether or not a call waits."""
        self._flush_asked = True
        self.nudge()

    def nudge(self) -> None:
        """Wake the actor thread to look for work and at its controls."""
        wake = False
        try:
            with self.lock:
                wake, self._asleep = self._asleep, False
            if wake:
                self._wake()
        except BaseException:  # Ctrl-C: others count on the actor too
            if wake:
                self._wake()
            raise

    def measure(self, clock: Clock) -> Meter:
        """The meter of the requests that are made from now on, or the one that measures already."""
        with self.lock:
            if self.meter is None:
                self.meter = Meter(clock)
            return self.meter

    def launching(self, calls: Sequence[Call[Any]]) -> None:
        """Let the meter, if there is one, know of a launch that answers these calls."""
        if self.meter is not None:
            with self.lock:
                self.meter.launched(calls)

    def launch_began(self, calls: int = 1) -> None:
        """Book a launch that answers so many calls."""
        with self.lock:
            self._launched += 1
            self._launched_calls += calls
            self._in_flight += 1
            self.saturated = self._in_flight >= self.max_in_flight

    def launch_passed(self, calls: int) -> None:
        """Book a launch that was over as soon as it began. For the actor's thread, which alone counts launches."""
        self._launched += 1
        self._launched_calls += calls

    def launch_ended(self) -> None:
        """Book the end of a launch, and let the actor go on if it waited for that."""
        with self.lock:
            self._in_flight -= 1
            self.saturated = self._in_flight >= self.max_in_flight
        self.nudge()
        if self._idle_callbacks:
            self.tell_idle()

    # Looking on

    def when_idle(self, callback: Callable[[], None], launches: bool = True) -> None:
        """Call ``callback`` as soon as no call is unanswered: once, or twice where Ctrl-C comes in between.

        launches: and no launch unfinished either (see `write_off`). One whose calls a deadline answered may never end.
        """
        entry = (callback, launches)
        with self.lock:
            self._idle_callbacks.append(entry)
        self.tell_idle()

    def stats(self) -> ActorStats:
        with self.lock:
            outcomes: Counter[str] = Counter()
            errors: Counter[str] = Counter()
            for kind, count in list(self.answered.items()):
                outcomes[outcome_of(kind)] += count
                if kind is not None:
                    errors[kind.__name__] += count
            return ActorStats(
                submitted=self._submitted,
                launched=self._launched,
                completed=outcomes["completed"],
                failed=outcomes["failed"],
                cancelled=outcomes["cancelled"],
                in_flight=self._in_flight,
                queued=len(self._waiting),
                requests_per_launch=self._launched_calls / self._launched if self._launched else 0.0,
                errors=dict(errors),
            )

    # Under the lock

    def let_go(self, call: Call[Any]) -> bool:
        """Forget a call that is answered. Called by the call itself, and again where Ctrl-C kept it from going on.

        True if `report` has something to tell.
        """
        if self.meter is not None:
            self.meter.answered(call)
        self._unanswered.discard(call)
        if call.parked:
            self._unpark(call)
        if self._waiting and self._waiting.pop(call.number, None) is not None:
            self._compact()
        return bool(self._idle_callbacks)

    def _unpark(self, call: Call[Any]) -> None:
        if call.parked:
            call.parked = False
            self._parked -= 1

    def rank(self, call: Call[Any]) -> tuple[int, int]:
        """The lowest goes first: a call that has waited for ``capacity`` others before newer ones of a step more."""
        return call.number - call.priority * self.capacity, call.number

    def _push(self, call: Call[Any]) -> None:
        place = self.rank(call)
        self._waiting[call.number] = call
        heappush(self._order, place)
        if call.state is DONE:  # since it was looked at
            self._waiting.pop(call.number, None)

    def _pop(self, limit: int) -> list[Call[Any]]:
        calls: list[Call[Any]] = []
        waiting = self._waiting
        while len(calls) < limit and waiting:  # asked last: where nothing waits, nothing may be left of the order
            call = waiting.pop(heappop(self._order)[1], None)
            if call is not None:  # else it was answered while it waited
                calls.append(call)
        return calls

    def _wake(self) -> None:
        # Called without the lock, which the woken thread takes first.
        if (pipe := self._pipe) is not None:
            pipe.wake()

    def _compact(self) -> None:
        # A burst of cancellations must not pile up in the order.
        if len(self._order) > 2 * len(self._waiting) + 64:
            order, self._order = self._order, []
            try:
                for place in order:
                    if place[1] in self._waiting:
                        heappush(self._order, place)
            except BaseException:  # Ctrl-C: what has its place twice is given out once
                self._order += order
                heapify(self._order)
                raise

    def _due(self) -> tuple[Callable[[], None], bool] | None:
        if self._unanswered:
            return None
        ended = self._in_flight == 0 or self._written_off
        return next((entry for entry in list(self._idle_callbacks) if ended or not entry[1]), None)
