"""Mailbox: the bounded queue in front of an actor, and the registry of every call that passed through it.

It outlives the actor: a restarted actor finds the calls that its predecessor left, and references stay valid. It
never blocks a sender. One lock guards all of it: calls ordered by priority and age, their states and answers, the
number of launches in flight, and whether the actor's thread sleeps. Only a sleeping thread needs to be woken.

The lock is re-entrant. At any point of a thread's work here, even under the lock, the garbage collector may end a task
that waits for a reply and so cancel its request. A signal handler or a finalizer may cancel and submit too. So no
decision under the lock relies on state that a function call in between may have changed.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, Protocol

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
    in_flight: launches that have not finished. Their requests may have been answered by a deadline already.
    errors: requests answered with an error, by the name of its type. Counts both the failed and the cancelled ones.
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


class Counted(Protocol):
    """A launch. over: True until the launch is counted as in flight, and again once it has ended."""

    over: bool


class Mailbox:
    """Calls for one actor.

    capacity: how many calls may wait: queued, parked, or gathered by the actor. A message whose type has
        ``frees_memory`` set is accepted beyond the capacity, because its memory would be lost otherwise.
    max_in_flight: how many launches may be unfinished. While that many are, the mailbox is ``saturated`` and `take`
        returns no calls.
    """

    make_pipe: Callable[[], WakePipe] = WakePipe  # a worker process replaces it

    def __init__(self, name: str, capacity: int, max_in_flight: int) -> None:
        self.name = name
        self.capacity = capacity
        self.max_in_flight = max_in_flight
        self.on_traced: Callable[[Call[Any]], None] | None = None
        self.lock: Any = threading.RLock()
        self.numbers: Iterator[int] = itertools.count(1)
        # The order of the calls, by rank and number, and the calls that still wait. A call that is answered while it
        # waits is released at once, with the arrays in its message. Its place in the order is skipped later.
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
        self._flush_requested = False
        self._pipe: WakePipe | None = None
        # While a sender's thread does the actor's work, the actor's thread stays asleep, and wake-ups are noted.
        self._working_directly = False
        self._nudged = False
        self._work: Callable[[Call[Any]], None] | None = None

    @property
    def closed(self) -> GpuActorsError | None:
        """The error that new calls are refused with, or None."""
        return None if self._closed is None else self._closed()

    # The sender's side

    def put(self, call: Call[Any], direct: bool = False) -> None:
        """Queue a call, or answer it at once with `Overloaded` or the error that the mailbox was closed with.

        direct: whether this thread does the actor's work on the call, if the actor sleeps and could launch it at once.
        """
        refusal: GpuActorsError | None = None
        wake = works = False
        work: Callable[[Call[Any]], None] | None = None
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
                    idle = self._asleep and not (self._waiting or self._flush_requested or self.saturated)
                    work = self._work
                    if direct and idle and work is not None:
                        self._asleep, self._working_directly = False, True
                        works = True
                    else:
                        self._push(call)
                        wake, self._asleep = self._asleep, False
            if refusal is not None:
                call.fail(refusal)
            elif wake:
                self._wake()
            elif works and work is not None:
                work(call)
        except BaseException:
            # Ctrl-C: the sender never gets the call. Other senders rely on the actor, so it must wake.
            if wake:
                self._wake()
            call.cancel()
            raise
        finally:
            if works:
                try:
                    self._give_back()
                except BaseException:  # Ctrl-C
                    self._nudged = True
                    self._give_back()
                    raise

    def close(self, reason: Callable[[], GpuActorsError], admit: type | None = None) -> None:
        """Refuse calls from now on, each with a new error from ``reason``. Queued calls stay.

        admit: a type of messages that are still accepted.
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
        """The unanswered calls that only the actor holds: it took them, and they are neither parked nor in flight."""
        with self.lock:
            taken = [call for call in list(self._unanswered) if call.number not in self._waiting and not call.parked]
        return [call for call in taken if call not in in_flight]

    def write_off(self) -> None:
        """Let `when_idle` no longer wait for launches, because they may never end."""
        with self.lock:
            self._written_off = True
        self.notify_idle()

    def abandon(self) -> None:
        """Release the actor and its pipe, because no actor will take calls again. Replies may live much longer."""
        self._pipe = self._work = None

    def after_fork(self, reason: Callable[[], GpuActorsError]) -> None:
        """Close this copy in a forked process, where no actor runs, and answer its calls."""
        self.lock = threading.RLock()
        self._pipe, self._asleep, self._working_directly = None, False, False  # the parent's actor sleeps in the pipe
        self.close(reason)
        self.fail_all(reason)
        self.write_off()

    def refuse(self, call: Call[Any], error: GpuActorsError) -> None:
        """Count a call and answer it with an error at once."""
        with self.lock:
            self._submitted += 1
        call.fail(error)

    def cancel_launched(self, _: Call[Any]) -> bool:
        """Cancel a call that has been launched. Always False: this mailbox cannot cancel a launch."""
        return False

    def record(self, call: Call[Any]) -> None:
        """Trace an answered call, and run the `when_idle` callbacks that are due. Called without the lock."""
        if call.traced and self.on_traced is not None:
            self.on_traced(call)
        self.notify_idle()

    def notify_idle(self) -> None:
        """Run the `when_idle` callbacks that are due."""
        while True:
            with self.lock:
                entry = self._due()
            if entry is None:
                return
            # The callback is removed after its call, so that after Ctrl-C in between it is called twice, not never.
            entry[0]()
            with self.lock:
                if entry in self._idle_callbacks:
                    self._idle_callbacks.remove(entry)

    # The actor's side

    def take(
        self, controls: deque[Any], work: Callable[[Call[Any]], None] | None = None, limit: int = 256
    ) -> list[Call[Any]] | None:
        """Sleep until calls wait, then take up to ``limit``, most urgent first. None if ``controls`` is not empty.

        The list is empty if a flush was requested and no call waits.
        work: does the actor's work on one call, on the thread of its sender, while the actor sleeps here (see `put`).
        """
        self._work = work
        while True:
            pipe = self._pipe = self._pipe or self.make_pipe()
            with self.lock:
                # Set before the check for work, so that a call that arrives after the check wakes the thread.
                self._asleep = not self._working_directly
                if self._working_directly:
                    self._nudged = True
                elif controls or ((self._waiting or self._flush_requested) and not self.saturated):
                    self._asleep = False
                    if controls:
                        return None
                    self._flush_requested = False
                    return self._pop(limit)
            pipe.wait()

    def requeue(self, calls: Iterable[Call[Any]]) -> None:
        """Queue calls again that were taken but not handled. They keep their place in the order."""
        with self.lock:
            for call in calls:
                if call.state is not DONE and call.number not in self._waiting:
                    self._push(call)
                self._unpark(call)  # last: until here an interruption may have left the call out of the queue
        self.nudge()

    def park(self, call: Call[Any]) -> None:
        """Note that an object that outlives the actor holds the call. The call still counts towards the capacity."""
        with self.lock:
            if call.state is not DONE and not call.parked:
                call.parked = True
                self._parked += 1

    def gather(self, count: int) -> None:
        """Note how many calls the actor has taken and keeps until other calls share their launches."""
        self._gathered = count

    def request_flush(self) -> None:
        """Request that the actor flushes as soon as another launch may begin, whether or not a call waits."""
        self._flush_requested = True
        self.nudge()

    def nudge(self) -> None:
        """Wake the actor's thread to look for calls and controls."""
        wake = False
        try:
            with self.lock:
                self._nudged = self._working_directly
                wake, self._asleep = self._asleep, False
            if wake:
                self._wake()
        except BaseException:  # Ctrl-C: others rely on the actor too
            if wake:
                self._wake()
            raise

    def _give_back(self) -> None:
        """Let the actor's thread work again, and wake it if there is something to do. Safe to repeat."""
        with self.lock:
            if self._working_directly:
                self._working_directly, self._asleep = False, True
        if self._nudged or ((self._waiting or self._flush_requested) and not self.saturated):
            self._nudged = False
            self.nudge()

    def measure(self, clock: Clock) -> Meter:
        """The mailbox's meter. The first call makes it, and it measures the requests from then on."""
        with self.lock:
            if self.meter is None:
                self.meter = Meter(clock)
            return self.meter

    def launching(self, calls: Sequence[Call[Any]]) -> None:
        """Measure a launch that answers these calls, if there is a meter."""
        if self.meter is not None:
            with self.lock:
                self.meter.launched(calls)

    def launch_began(self, calls: int = 1, launch: Counted | None = None) -> None:
        """Count a launch that answers ``calls`` calls."""
        with self.lock:
            self._launched += 1
            self._launched_calls += calls
            self._in_flight += 1
            if launch is not None:
                launch.over = False
            self.saturated = self._in_flight >= self.max_in_flight

    def launch_passed(self, calls: int) -> None:
        """Count a launch that ended as soon as it began. Only the thread that does the actor's work may call it."""
        self._launched += 1
        self._launched_calls += calls

    def launch_ended(self, launch: Counted | None = None) -> None:
        """Count the end of a launch, and wake the actor if calls or a flush wait.

        launch: counted only once, even if this is repeated.
        """
        with self.lock:
            if launch is None or not launch.over:
                self._in_flight -= 1
                if launch is not None:
                    launch.over = True
            self.saturated = self._in_flight >= self.max_in_flight
        # Read without the lock: a call or a flush that comes later wakes the actor anyway.
        if self._waiting or self._flush_requested:
            self.nudge()
        if self._idle_callbacks:
            self.notify_idle()

    # Observation

    def when_idle(self, callback: Callable[[], None], launches: bool = True) -> None:
        """Call ``callback`` as soon as no call is unanswered: once, or twice if Ctrl-C interrupts it.

        launches: whether to wait for unfinished launches too (see `write_off`). A launch whose calls were answered by a
            deadline may never end.
        """
        entry = (callback, launches)
        with self.lock:
            self._idle_callbacks.append(entry)
        self.notify_idle()

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

    def release(self, call: Call[Any]) -> bool:
        """Forget an answered call. `Call.settle` does this, and repeats it if Ctrl-C interrupted it.

        True if `record` has callbacks to run.
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
        """The call's place: the lowest goes first. A step of priority overtakes up to ``capacity`` older calls."""
        return call.number - call.priority * self.capacity, call.number

    def _push(self, call: Call[Any]) -> None:
        place = self.rank(call)
        self._waiting[call.number] = call
        heappush(self._order, place)
        if call.state is DONE:  # it was answered meanwhile
            self._waiting.pop(call.number, None)

    def _pop(self, limit: int) -> list[Call[Any]]:
        calls: list[Call[Any]] = []
        waiting = self._waiting
        while len(calls) < limit and waiting:  # evaluated last: if no call waits, the order may be empty
            call = waiting.pop(heappop(self._order)[1], None)
            if call is not None:  # else it was answered while it waited
                calls.append(call)
        return calls

    def _wake(self) -> None:
        # Called without the lock, which the woken thread takes first.
        if (pipe := self._pipe) is not None:
            pipe.wake()

    def _compact(self) -> None:
        # The places of cancelled calls must not pile up in the order.
        if len(self._order) > 2 * len(self._waiting) + 64:
            order, self._order = self._order, []
            try:
                for place in order:
                    if place[1] in self._waiting:
                        heappush(self._order, place)
            except BaseException:  # Ctrl-C: a call with two places is taken once
                self._order += order
                heapify(self._order)
                raise

    def _due(self) -> tuple[Callable[[], None], bool] | None:
        if self._unanswered:
            return None
        launches_over = self._in_flight == 0 or self._written_off
        # No generator: Ctrl-C is lost while a generator is closed.
        for entry in list(self._idle_callbacks):
            if launches_over or not entry[1]:
                return entry
        return None
