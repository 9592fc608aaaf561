"""Relay: the requests of a program on their way to a worker and back. It knows no processes.

    submit ──> waiting ──attach──> asked ──> Answer          (a worker has it: `Call.state` is LAUNCHED)
                  │                  └─────> ContextLost     (detach: every request that the worker had)
                  └──> deadline, cancelled, Overloaded, ActorStopped

A request is numbered once in the life of its context, so an answer that comes late or twice finds nothing.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

from gpu_actors.actors.compiled_kernel import CompiledKernel, LaunchKernel
from gpu_actors.clock import SYSTEM_CLOCK
from gpu_actors.errors import (
    DeadlineExceeded,
    GpuActorsError,
    InvalidRequest,
    Overloaded,
    RequestCancelled,
    StaleBuffer,
)
from gpu_actors.isolation.channel import Channel, Link
from gpu_actors.isolation.records import Answer, Ask, Cancel, Counts, Forget, KernelMade
from gpu_actors.isolation.remote_queries import PATIENCE
from gpu_actors.isolation.serialization import harmless, outbound, undoing
from gpu_actors.isolation.worker import KernelRef
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.mailbox import ActorStats, Mailbox
from gpu_actors.runtime.waking import Outbox

__all__ = ["Reason", "Relay", "RelayMailbox", "RemoteKernel"]

_NOTHING = Counts(0, 0, 0, 0)

Reason = Callable[[bool], GpuActorsError]
"""Makes the error of one request. Its argument: whether a worker had the request, and may have carried it out."""


class RemoteKernel:
    """Where a `CompiledKernel` lies: the worker's number for it, and the generation that has it."""

    def __init__(self, number: int, generation: int) -> None:
        self.number = number
        self.generation = generation


class _Pending:
    """A request that a worker has."""

    __slots__ = ("call", "finish", "harmless")

    def __init__(self, call: Call[Any], finish: Callable[[Any], Any] | None, harmless: bool) -> None:
        self.call = call
        self.finish = finish
        self.harmless = harmless


class RelayMailbox(Mailbox):
    """The account of one actor's requests, which go to a worker in place of a thread of this process."""

    def __init__(self, name: str, capacity: int, max_in_flight: int, relay: Relay) -> None:
        super().__init__(name, capacity, max_in_flight)
        self._relay = relay
        self._before = _NOTHING  # of earlier generations
        self._there = _NOTHING

    def put(self, call: Call[Any]) -> None:
        refusal: GpuActorsError | None = None
        with self.lock:
            self._submitted += 1
            if self._closed is not None:
                refusal = self._closed()
            else:
                self._unanswered.add(call)
                if self.meter is not None:
                    self.meter.accepted(call)
        if refusal is not None:
            call.fail(refusal)
            return
        try:
            self._relay.submit(self.name, call)
        except GpuActorsError as error:
            call.fail(error)
        except BaseException:  # Ctrl-C: the sender never learns of the call
            call.fail(RequestCancelled("interrupted as it was made"))
            raise

    def release(self, call: Call[Any]) -> bool:
        self._relay.forget(call)
        return super().release(call)

    def cancel_launched(self, call: Call[Any]) -> bool:
        return self._relay.cancel(call)

    def there(self, counts: Counts) -> None:
        """The worker's counts of the actor now."""
        self._there = counts

    def begin_again(self) -> None:
        """Another worker follows, whose counts begin at 0."""
        launched, calls = self._sums()
        self._before, self._there = Counts(launched, calls, 0, 0), _NOTHING

    def stats(self) -> ActorStats:
        mine = super().stats()
        launched, calls = self._sums()
        there = self._there
        return ActorStats(
            submitted=mine.submitted,
            launched=launched,
            completed=mine.completed,
            failed=mine.failed,
            cancelled=mine.cancelled,
            in_flight=there.in_flight,
            queued=there.queued + self._relay.waiting(self.name),
            requests_per_launch=calls / launched if launched else 0.0,
            errors=mine.errors,
        )

    def _sums(self) -> tuple[int, int]:
        before, there = self._before, self._there
        return before.launched + there.launched, before.launched_calls + there.launched_calls


class _Here(threading.local):
    """sending: this thread is in the middle of sending, or is the channel's own."""

    sending = False


class Relay:
    """Sends requests to the worker there is, and keeps them while there is none.

    capacity: requests that may wait for a worker, or for a channel that takes nothing more. wake: has the channel's
    thread call `pump`. kernel_cell: of the actor that kernels belong to, once it is made.

    The garbage collector may make and cancel requests wherever a thread is, also while that thread sends another. So
    what it does then, as every cancellation, only leaves a note, which the channel's thread sends.
    """

    def __init__(self, capacity: int, wake: Callable[[], None]) -> None:
        self._capacity = capacity
        self._wake = wake
        self._lock = threading.RLock()
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Pending] = {}
        self._numbered: dict[Call[Any], int] = {}
        self._given_up: dict[int, Call[Any]] = {}  # answered here before the worker's answer has come
        self._waiting: deque[tuple[str, Call[Any]]] = deque()
        self._notes: deque[Any] = deque()
        self._link: Link | None = None
        self._channel: Channel | None = None
        self._generation = 0
        self._here = _Here()
        self._own: RelayMailbox = RelayMailbox("", 1, 1, self)
        self._over: Callable[[], GpuActorsError] | None = None
        self.kernel_cell: Any = None

    # The program's side

    def submit(self, actor: str, call: Call[Any]) -> None:
        """Send a request, or have it wait for a worker. Raises `Overloaded` (not for what frees memory, as in
        `Mailbox`), and `InvalidRequest` for what cannot cross."""
        bounded = not getattr(type(call.message), "frees_memory", False)
        with self._lock:
            if self._over is not None:
                raise self._over()
            link = self._link
            if link is None or self._waiting or self._here.sending:
                if bounded and self._waits() >= self._capacity:
                    raise Overloaded(f"{actor}: {self._capacity} requests wait for the context's process", 1.0)
                self._waiting.append((actor, call))
                self._wake()
                return
        channel = self._channel
        if bounded and channel is not None and channel.waiting >= self._capacity:
            raise Overloaded(f"{actor}: the context's process takes no requests at the moment", 1.0)
        self._here.sending = True
        try:
            sent = self._send(link, actor, call)
        finally:
            self._here.sending = False
        if not sent:
            with self._lock:
                self._waiting.append((actor, call))

    def ask(self, name: str, *arguments: Any) -> Any:
        """Ask a worker a question, and wait for the answer. Raises `DeadlineExceeded` where none comes."""
        call = self.about_context((name, *arguments), None)
        if not call.wait(PATIENCE):
            call.fail(DeadlineExceeded(f"the context's process did not answer within {PATIENCE} s"))
        return call.answer()

    def about_context(self, message: tuple[Any, ...], timeout: float | None) -> Call[Any]:
        """Send a request for the context itself."""
        deadline = None if timeout is None else SYSTEM_CLOCK.now() + timeout
        call: Call[Any] = Call(message, self._own, 0, deadline)
        self._own.put(call)
        return call

    def cancel(self, call: Call[Any]) -> bool:
        """Ask the worker to cancel a request that it has. True if the request is answered with that already.

        One that writes into nothing but its answer is given up here. For others the worker has the word: it answers
        `RequestCancelled`, or what became of them.
        """
        number = self._numbered.get(call)
        pending = None if number is None else self._asked.get(number)
        if number is None or pending is None:
            return False
        if pending.harmless:
            return call.fail(RequestCancelled("cancelled, and its result would be dropped"))
        self._tell(Cancel(number))
        return False

    def forget(self, call: Call[Any]) -> None:
        """A request is answered: by the worker, or here, which the worker is told."""
        number = self._numbered.pop(call, None)
        if number is None:
            return
        self._given_up[number] = call  # before the answer may find that no one waits for it
        if self._asked.pop(number, None) is None:
            self._given_up.pop(number, None)
            return
        if self._channel is not None:
            self._channel.forget(number)
        self._tell(Cancel(number))

    def waiting(self, actor: str) -> int:
        """Requests for an actor that wait for a worker."""
        with self._lock:
            return sum(name == actor and not call.done for name, call in self._waiting)

    # The worker's side: on the channel's thread

    def attach(self, link: Link, channel: Channel, generation: int) -> None:
        """There is a worker: it gets what waits, in order, and then what comes."""
        self._here.sending = True
        with self._lock:
            self._notes.clear()  # for the worker before it
            self._link, self._channel, self._generation = link, channel, generation
        self.pump()

    def pump(self) -> None:
        """Send what waits for this thread."""
        link = self._link
        if link is None:
            return
        while self._waiting:
            with self._lock:
                actor, call = self._waiting[0]
            try:
                if not self._send(link, actor, call):
                    return
            except GpuActorsError as error:
                call.fail(error)
            with self._lock:  # until here, what is made meanwhile waits behind it
                if self._waiting and self._waiting[0][1] is call:
                    self._waiting.popleft()
        while self._notes:
            link.send(self._notes.popleft())

    def detach(self) -> list[Call[Any]]:
        """The worker is lost: what is asked from now on waits for the next one. Gives what it had, for `lose`."""
        with self._lock:
            self._link = self._channel = None
            asked, self._asked = self._asked, {}
            self._numbered, self._given_up = {}, {}
        return [pending.call for pending in asked.values()]

    def lose(self, calls: Iterable[Call[Any]], reason: Reason) -> None:
        """Answer what a lost worker had."""
        outbox = Outbox()
        for call in calls:
            call.fail(reason(True), outbox)
        outbox.flush()

    def give_up(self, reason: Reason) -> None:
        """No worker will come: answer what waits too, and refuse what follows."""
        with self._lock:
            if self._over is None:
                self._over = functools.partial(reason, False)
        self.lose(self.detach(), reason)
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        outbox = Outbox()
        for _, call in waiting:
            call.fail(reason(False), outbox)
        outbox.flush()

    def answered(self, answer: Answer, outbox: Outbox | None = None) -> None:
        """The worker has answered. An answer to what is answered already is dropped."""
        pending = self._asked.pop(answer.number, None)
        if pending is None:
            self._give_back(self._given_up.pop(answer.number, None), answer.value)
            return
        call = pending.call
        self._numbered.pop(call, None)
        if answer.counts is not None and isinstance(call.mailbox, RelayMailbox):
            call.mailbox.there(answer.counts)
        value, error = answer.value, answer.error
        if error is None:
            try:
                value = self._made(value) if type(value) is KernelMade else value
                value = value if pending.finish is None else pending.finish(value)
            except Exception as failure:
                error = failure if isinstance(failure, GpuActorsError) else GpuActorsError(repr(failure))
        if not call.settle(value, error, outbox):
            self._give_back(call, value)

    def unreadable(self, number: int, error: BaseException, outbox: Outbox | None = None) -> None:
        """An answer that cannot be unpacked here."""
        self.answered(Answer(number, None, error, None, None), outbox)

    def after_fork(self) -> None:
        """In a forked child, which has no worker."""
        self._lock = threading.RLock()
        self._link = self._channel = None

    # Inside

    def _waits(self) -> int:
        if len(self._waiting) >= self._capacity:
            self._waiting = deque(entry for entry in self._waiting if not entry[1].done)
        return len(self._waiting)

    def _tell(self, note: Any) -> None:
        self._notes.append(note)
        self._wake()

    def _send(self, link: Link | None, actor: str, call: Call[Any]) -> bool:
        """Send a request. False if the worker is lost, so that the request has to wait for the next one."""
        message, finish = outbound(call.message, call.caller_notes)
        if type(message) is LaunchKernel:
            message = self._launch(message)
        number = next(self._numbers)
        pending = _Pending(call, finish, harmless(call.message))
        with self._lock:
            if link is None or link is not self._link:
                return False
            if not call.claim():
                return True
            self._asked[number] = pending
            self._numbered[call] = number
        left = None if call.deadline is None else call.deadline - SYSTEM_CLOCK.now()
        try:
            link.send(Ask(number, actor, message, left, call.priority), number)
        except BaseException:
            self._numbered.pop(call, None)
            self._asked.pop(number, None)
            raise
        return True

    def _give_back(self, call: Call[Any] | None, value: Any) -> None:
        """An answer has come too late. What the worker has made for it is given back, for no one else knows of it."""
        if type(value) is KernelMade:
            self._tell(Forget(value.number))
        undo = None if call is None or value is None else undoing(call.message, value)
        if undo is not None:
            mailbox: Any = call and call.mailbox
            self._tell(Ask(next(self._numbers), mailbox.name, undo, None, 0))

    def _made(self, made: KernelMade) -> CompiledKernel:
        there = RemoteKernel(made.number, self._generation)
        weakref.finalize(there, self._forget_kernel, made.number, self._generation).atexit = False
        sizes = made.parameter_bytes
        return CompiledKernel(self.kernel_cell, made.entry, made.parameters, sizes, made.cubin, cast("Any", there))

    def _forget_kernel(self, number: int, generation: int) -> None:
        if generation == self._generation:
            self._tell(Forget(number))

    def _launch(self, message: LaunchKernel) -> LaunchKernel:
        kernel = message.kernel
        if not isinstance(kernel, CompiledKernel) or not kernel.belongs_to(self.kernel_cell):
            raise InvalidRequest("kernel", type(kernel).__name__, "must be one that ctx.kernel of this context gave")
        there: Any = kernel.loaded
        if not isinstance(there, RemoteKernel) or there.generation != self._generation:
            raise StaleBuffer(f"it was not compiled in generation {self._generation} of the context: compile it again")
        reference: Any = KernelRef(there.number)
        return LaunchKernel(reference, message.grid, message.block, message.args, message.out, message.shared_bytes)
