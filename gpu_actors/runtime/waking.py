"""Waking: how a thread or a task sleeps until there is work for it, and how it is woken.

    WakePipe  an actor's thread sleeps in it until a call or a message arrives
    Waiter    a task suspends on it until its request is answered
    Outbox    gathers the waiters of a batch of answers, and wakes each event loop once

Waking an event loop costs a system call and a trip through its selector, far more than the answer itself. An actor's
thread therefore settles a whole batch of calls first.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from dataclasses import dataclass
from typing import Any

__all__ = ["Outbox", "Waiter", "WakePipe"]

Step = Callable[["Waiter"], object]
_ONE = b"\0\0\0\1\0\0\0\0"  # a small number in either byte order, which an eventfd adds up


class WakePipe:
    """One thread sleeps in `wait`. Any other thread wakes it with `wake`.

    It uses a descriptor, not a lock, because the write to one releases the GIL. A thread that a lock wakes finds the
    GIL taken and sleeps a second time. On Linux it is an eventfd, which costs less than the pipe of other systems.

    A wake-up is not lost if no thread waits yet. A wait may end without a wake-up, so look for work after it. Raises
    OSError if the process has no file descriptors left. The last reference closes the descriptors.
    """

    __slots__ = ("__weakref__", "_reader", "_writer")

    def __init__(self) -> None:
        self._reader, self._writer = (os.eventfd(0),) * 2 if hasattr(os, "eventfd") else os.pipe()
        # They stay open when the interpreter exits: a daemon thread may still sleep here.
        for descriptor in {self._reader, self._writer}:
            weakref.finalize(self, os.close, descriptor).atexit = False

    def wait(self) -> None:
        """Sleep until the next `wake`."""
        os.read(self._reader, 64)

    def wake(self) -> None:
        os.write(self._writer, _ONE)


@dataclass(slots=True, eq=False)
class Waiter:
    """One task awaits it, once: ``yield waiter``. Only the loop's own thread may use anything but ``loop``.

    A task that awaits an asyncio future goes to the end of its loop's queue once the future is set. If no other task
    is ready, the loop then needs another turn, with another poll of its selector. A Waiter is future-like in asyncio's
    sense (`asyncio.isfuture`): a task adds its next step to it as to any future, and `wake` runs that step at once.
    """

    loop: asyncio.AbstractEventLoop
    _asyncio_future_blocking: bool = True  # tells a task that it has a future to wait for
    _over: bool = False
    _error: asyncio.CancelledError | None = None
    _step: Step | None = None
    _context: Context | None = None

    def wake(self) -> None:
        """Run the task's next step. If the task ends its loop with an exception, raises that."""
        # No function call in between: Ctrl-C after one would lose the step.
        step, self._step = self._step, None
        self._over = True
        if step is not None and self._context is not None:
            self._context.run(step, self)

    # What a task calls on a future

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self.loop

    def add_done_callback(self, step: Step, *, context: Context) -> None:
        """Set the task's next step. The task adds it before the loop runs anything else."""
        self._step, self._context = step, context

    def cancel(self, msg: Any | None = None) -> bool:
        """Make the wait raise ``CancelledError``. False if the wait has ended."""
        if self._over:
            return False
        self._error = asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg)
        # The step is released: its task may end with an error whose traceback holds this waiter.
        step, self._step = self._step, None
        self._over = True
        if step is not None:
            self.loop.call_soon(step, self, context=self._context)
        return True

    def result(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame: see Call.answer


class Outbox:
    """Collects waiters to wake. It belongs to one thread, which must call `flush` before it sleeps."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []

    def add(self, waiters: Iterable[Waiter]) -> None:
        """Wake these at the next flush."""
        self._waiters.extend(waiters)

    def flush(self) -> None:
        """Wake every collected waiter, with one call into each loop."""
        waiters = self._waiters
        if not waiters:
            return
        self._waiters = []
        try:
            _wake_all(waiters)
        except BaseException:  # Ctrl-C: a waiter that is woken twice ignores the second wake-up
            _wake_all(waiters)
            raise


def _wake_all(waiters: Sequence[Waiter]) -> None:
    if len(waiters) == 1:
        _call(waiters[0].loop, waiters[0].wake)
        return
    for loop in {waiter.loop for waiter in waiters}:
        _call(loop, _wake, deque([waiter for waiter in waiters if waiter.loop is loop]))


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    # The selector of the loop that runs here needs no wake-up, which is a system call.
    call = loop.call_soon if asyncio._get_running_loop() is loop else loop.call_soon_threadsafe
    try:
        call(function, *arguments)
    except RuntimeError:
        # The loop was closed while its requests were in flight. No task is left to wake. The answers stay on the
        # calls, for holders of the replies.
        return


def _wake(waiters: deque[Waiter]) -> None:
    if len(waiters) > 1:
        # A task that ends the loop with an exception, or runs the loop from within, must not stop the others.
        waiters[0].loop.call_soon(_wake, waiters)
    while waiters:
        # A waiter is removed after it was woken, so that Ctrl-C in between does not lose it. If its task ran the loop
        # from within, the loop may have removed it already.
        waiter = waiters[0]
        waiter.wake()
        if waiters and waiters[0] is waiter:
            waiters.popleft()
