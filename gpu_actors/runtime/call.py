"""Call: one request on its way through an actor, from submission to its single answer.

    QUEUED ──launch──> LAUNCHED ──settle──> DONE
       │ └─────<─unclaim─┘                   │
       └────────────────settle───────────────┘

Five parties may settle a call, and the first one decides its answer: the actor, the completion thread, the deadline
timer, a waiter that cancels, and the context that closes or fails. All of them use `settle`, so a call is answered
exactly once. The mailbox's lock also guards its calls, so a call is answered and counted in one step.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Generic, Protocol, TypeVar

from gpu_actors.errors import DeadlineExceeded, RequestCancelled
from gpu_actors.process import Local
from gpu_actors.runtime.timers import Timer
from gpu_actors.runtime.waking import Outbox, Waiter

__all__ = ["DONE", "LAUNCHED", "QUEUED", "Call", "CallState", "Gate"]

logger: logging.Logger = logging.getLogger("gpu_actors")

T = TypeVar("T")


class CallState(IntEnum):
    QUEUED = 0
    LAUNCHED = 1
    DONE = 2


# Looking a member up on its enum costs more than comparing with it.
QUEUED, LAUNCHED, DONE = CallState


class CallRegistry(Protocol):
    """The part of a `Mailbox` that the calls sent to it use. Its lock guards those calls."""

    lock: Any  # re-entrant: see Mailbox
    numbers: Iterator[int]
    answered: defaultdict[type[BaseException] | None, int]

    def release(self, call: Call[Any]) -> bool: ...
    def cancel_launched(self, call: Call[Any]) -> bool: ...
    def record(self, call: Call[Any]) -> None: ...
    def notify_idle(self) -> None: ...


class Gate:
    """Blocks one thread until a call is done. A gate may be opened twice.

    An Event would not do, because its own lock is not re-entrant and the waiting thread may be the one that settles
    the call.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def __call__(self, call: Call[Any]) -> None:
        if self._lock.locked():
            self._lock.release()

    def wait(self, timeout: float | None) -> None:
        self._lock.acquire(timeout=-1 if timeout is None else max(timeout, 0.0))


@dataclass(slots=True, eq=False, repr=False)
class Call(Local, Generic[T]):
    """A message, its answer once it has one, and the waiters for the answer. Safe to use from any thread.

    caller_notes: the facts that had to be noted on the caller's thread, such as the thread's stream.
    prepared: the object that the handle prepared on the caller's thread, such as a cached plan, or None.
    parked: whether an object that outlives the actor holds the call outside the queue, to answer or requeue it later.
    unmergeable: whether the call must be launched alone, because a launch that it shared with others has failed.
    traced: whether the call is traced. Decided when it was accepted, so that a trace has all events of a call or none.
    """

    message: Any
    mailbox: CallRegistry
    priority: int = 0
    deadline: float | None = None
    number: int = field(init=False)
    caller_notes: Any = field(init=False, default=None)
    prepared: Any = field(init=False, default=None)
    parked: bool = field(init=False, default=False)
    unmergeable: bool = field(init=False, default=False)
    state: CallState = field(init=False, default=QUEUED)
    value: T | None = field(init=False, default=None)
    error: BaseException | None = field(init=False, default=None)
    timer: Timer | None = field(init=False, default=None)
    traced: bool = field(init=False, default=False)
    _context: BaseException | None = field(init=False, default=None)
    _waiters: list[Waiter] | None = field(init=False, default=None)
    _callbacks: list[Callable[[Call[T]], None]] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.number = next(self.mailbox.numbers)

    @property
    def done(self) -> bool:
        return self.state is DONE

    # Towards the answer

    def claim(self) -> bool:
        """Claim the call for its launch. False if it has been claimed, or answered (cancelled, expired), already."""
        with self.mailbox.lock:
            if self.state is not QUEUED:
                return False
            self.state = LAUNCHED
            return True

    def unclaim(self) -> bool:
        """Undo the claim, because the launch did not answer the call and the call will be launched again.

        False if the call has been answered meanwhile.
        """
        with self.mailbox.lock:
            if self.state is not LAUNCHED:
                return False
            self.state = QUEUED
            return True

    def resolve(self, value: T, outbox: Outbox | None = None) -> bool:
        """Answer with a result. False if the call has an answer already."""
        return self.settle(value, None, outbox)

    def fail(self, error: BaseException, outbox: Outbox | None = None) -> bool:
        """Answer with an error. False if the call has an answer already."""
        return self.settle(None, error, outbox)

    def cancel(self) -> bool:
        """Answer with `RequestCancelled` unless the call has been launched or answered. True if it is cancelled."""
        if self.settle(None, RequestCancelled("cancelled before its launch"), None, QUEUED):
            return True
        return self.state is LAUNCHED and self.mailbox.cancel_launched(self)

    def expire(self) -> None:
        """Answer with `DeadlineExceeded`. If the call was launched, the launch goes on and its result is dropped."""
        launched = self.state is LAUNCHED
        where = "after its launch" if launched else "before its launch"
        self.fail(DeadlineExceeded(f"the deadline passed {where}"))

    def settle(
        self,
        value: T | None,
        error: BaseException | None,
        outbox: Outbox | None,
        latest: CallState = LAUNCHED,
    ) -> bool:
        """Answer with ``error``, or with ``value`` if there is no error. False if the call's state is past ``latest``.

        On the main thread Ctrl-C may raise KeyboardInterrupt after any function call in here, and that must not lose a
        waiter. So the change of state calls no function, and the steps after it can be repeated.
        """
        mailbox = self.mailbox
        kind = None if error is None else type(error)
        settled = False
        waiters = callbacks = None
        called = 0
        try:
            with mailbox.lock:
                if self.state > latest:
                    return False
                waiters, callbacks = self._waiters, self._callbacks
                self._waiters = self._callbacks = None
                self.value = value
                self.error = error
                if error is not None:
                    self._context = error.__context__
                settled = True
                # Counted before any waiter is woken, so that a waiter that reads the stats finds its call in them.
                mailbox.answered[kind] += 1
                # Set last: a thread that sees the call done reads its answer without the lock.
                self.state = DONE
                idle = mailbox.release(self)
            if self.timer is not None:
                self.timer.cancel()
            if self.traced or idle:
                mailbox.record(self)
            if waiters is not None:
                box = outbox if outbox is not None else Outbox()
                box.add(waiters)
                if outbox is None:
                    box.flush()
            if callbacks is not None:
                for callback in callbacks:
                    callback(self)
                    called += 1
        except BaseException as interruption:
            if settled:
                # A callback that Ctrl-C interrupted is called again. One that raised an Exception is not.
                called += isinstance(interruption, Exception)
                self._wake_again(waiters, (callbacks or ())[called:])
            raise
        return True

    def _wake_again(self, waiters: Sequence[Waiter] | None, callbacks: Sequence[Callable[[Call[T]], None]]) -> None:
        """Repeat the steps after an answer, because they were interrupted. A waiter ignores a second wake-up."""
        self.mailbox.release(self)
        outbox = Outbox()
        outbox.add(waiters or ())
        outbox.flush()
        interrupted: BaseException | None = None
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                logger.exception("what waited for a request raised")
            except BaseException as error:  # Ctrl-C is raised once the others have been called
                interrupted = error
        self.mailbox.notify_idle()
        if interrupted is not None:
            raise interrupted

    # Waiting for it

    def add_waiter(self, waiter: Waiter) -> bool:
        """Wake this waiter when the call is done. False if the call is done already."""
        first = [waiter]  # made outside the lock: making an object may start a garbage collection (see Mailbox)
        with self.mailbox.lock:
            if self.state is DONE:
                return False
            if self._waiters is None:
                self._waiters = first
            else:
                self._waiters.append(waiter)
            return True

    def abandon(self, waiter: Waiter) -> None:
        """Remove a waiter that gave up. Cancel the call if no other waiter is left."""
        with self.mailbox.lock:
            waiters = self._waiters
            if waiters is None or waiter not in waiters:
                return
            waiters.remove(waiter)
            if waiters or self._callbacks:
                return
        self.cancel()

    def wait(self, timeout: float | None) -> bool:
        """Block this thread until the call is done. False if ``timeout`` seconds passed first."""
        gate = Gate()
        self.when_done(gate)
        try:
            gate.wait(timeout)
        finally:  # interrupted or not, this thread no longer waits
            self.forget_callbacks(lambda added: added is gate)
        return self.done

    def when_done(self, callback: Callable[[Call[T]], None]) -> None:
        """Call ``callback`` with this call once it is done, on the thread that settles it, or now if it is done."""
        first = [callback]
        with self.mailbox.lock:
            if self.state is not DONE:
                if self._callbacks is None:
                    self._callbacks = first
                else:
                    self._callbacks.append(callback)
                return
        callback(self)

    def forget_callbacks(self, unwanted: Callable[[Callable[[Call[T]], None]], bool]) -> int:
        """Remove the callbacks that are ``unwanted``. Returns how many; those called already do not count."""
        removed = 0
        with self.mailbox.lock:
            for callback in list(self._callbacks or ()):
                if unwanted(callback) and self._callbacks is not None and callback in self._callbacks:
                    self._callbacks.remove(callback)
                    removed += 1
        return removed

    def answer(self) -> T:
        """Return the result of a call that is done, or raise its error."""
        error = self.error
        if error is None:
            return self.value  # type: ignore[return-value]
        try:
            # Drops the frames that an earlier reader left in the traceback.
            raise error.with_traceback(None)
        finally:
            # The readers share this error. If this one was handling another error, raising made that one its context.
            error.__context__ = self._context
            # The error's traceback holds this frame. Deleting breaks that cycle: a failed call is freed at once and
            # the garbage collector has nothing to do.
            del self, error
