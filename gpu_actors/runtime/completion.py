"""Completion: settles the calls of a stream's launches, in order, as they end.

Each stream has one thread that waits for its launches. A wait on an event releases the GIL and raises the launch's
error. It also makes batches: all launches that finished while the thread was busy are settled, then each loop is woken
once. A host callback from the driver would do none of this, and the driver never calls it after a device error.

Waking that thread, and then the loop, takes longer than a brief launch. So a loop whose own thread launched polls the
launch between its tasks, for `_POLLED` seconds at most. The thread stays responsible: the loop may be blocked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_actors.clock import Clock
from gpu_actors.devices.interface import Event, Outputs
from gpu_actors.errors import ActorFailed, ContextLost, GpuActorsError, MockModeError, caused
from gpu_actors.runtime.call import LAUNCHED, Call
from gpu_actors.runtime.mailbox import Mailbox
from gpu_actors.runtime.progress import Progress
from gpu_actors.runtime.waking import Outbox
from gpu_actors.values import show

__all__ = ["Completion", "Failed", "Finish", "as_answer"]

logger: logging.Logger = logging.getLogger("gpu_actors")

_SHORTEST, _LONGEST = 1e-5, 1e-3
"""The shortest and the longest pause, in seconds, between two checks of a launch that a thread waits for."""

_POLLED = 200e-6
"""Seconds for which a loop polls a launch: about the time of two wake-ups of a thread."""

_TICK, _TICKS = 5e-2, 10
"""Seconds between two checks of a thread that nothing wakes, and after how many checks without a launch it sleeps."""

_WAKING = 1e-4
"""Seconds that a thread takes to wake. A thread that takes longer is waiting for the GIL."""

Finish = Callable[[Outputs], Sequence[Any]]
"""Turns a launch's outputs into one result for each of its calls."""

Failed = Callable[[BaseException], Collection[Call[Any]]]
"""Called with the error of a failed launch. Returns the calls that it launches again: they do not get the error."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A launch. over: True until the launch is counted as in flight, and again once it has ended."""

    event: Event
    calls: Sequence[Call[Any]]
    finish: Finish
    failed: Failed | None
    since: float
    over: bool = True
    _finishing: bool = False

    def finish_once(self, outputs: Outputs) -> Sequence[Any]:
        if self._finishing:  # Ctrl-C interrupted it: how far it got is not known
            raise ActorFailed("the program was interrupted while the request was finished")
        self._finishing = True
        return self.finish(outputs)


@dataclass(eq=False)
class Completion:
    """Settles the calls of one stream's launches.

    on_lost: called when a launch reports that the context is lost, on the thread that saw the report. Returns the
        error for the launch's calls.
    progress: counts how launches end.
    bind_thread: `Device.bind_thread`.
    """

    name: str
    mailbox: Mailbox
    clock: Clock
    on_lost: Callable[[ContextLost], ContextLost]
    progress: Progress
    bind_thread: Callable[[], None] = lambda: None
    _entries: deque[_Entry] = field(init=False, default_factory=deque)
    _thread: threading.Thread | None = field(init=False, default=None)
    _bell: queue.SimpleQueue[None] = field(init=False, default_factory=queue.SimpleQueue)
    _asleep: bool = field(init=False, default=True)
    _next_look: float = field(init=False, default=math.inf)
    _closing: bool = field(init=False, default=False)
    # One thread at a time settles launches, oldest first, and uses the outbox. If Ctrl-C stops it, ``_thread`` goes on.
    _settling: bool = field(init=False, default=False)
    _interrupted: bool = field(init=False, default=False)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _outbox: Outbox = field(init=False, default_factory=Outbox)
    # The loop that polls, and whether the last launch was brief, so that the next one may be brief too.
    _loop: asyncio.AbstractEventLoop | None = field(init=False, default=None)
    _brief: bool = field(init=False, default=True)
    _waited_for: list[float] = field(init=False, default_factory=list)

    def watch(
        self,
        event: Event,
        calls: Sequence[Call[Any]],
        finish: Finish,
        outbox: Outbox,
        failed: Failed | None = None,
    ) -> None:
        """Count the launch, and settle ``calls`` when ``event`` is done.

        They are settled at once if it is done and no earlier launch is unfinished. Only the thread that does the
        actor's work may call this. If it runs a loop, and launches are brief, the launches that have ended are settled
        here, and the loop polls the others.
        """
        if self.mailbox.meter is not None:
            self.mailbox.launching(calls)
        interruption: BaseException | None = None
        if self._entries and self._polling_loop() is not None:
            try:
                self._settle_ended()
            except BaseException as error:  # Ctrl-C is raised once this launch is watched
                interruption = error
        if not self._entries and event.done():
            self.mailbox.launch_passed(len(calls))
            self._settle(event, calls, finish, failed, outbox)
            if interruption is not None:
                raise interruption
            return
        if self._thread is None or self._thread.ident is None:  # a start that was interrupted may have no thread
            self._thread = threading.Thread(target=self._run, name=f"{self.name}-completion", daemon=True)
            try:
                self._thread.start()  # before the launch is counted: without the thread its count would never end
            except Exception:
                self._thread = None
                raise
        entry = _Entry(event, calls, finish, failed, self.clock.now())
        try:
            self.mailbox.launch_began(len(calls), entry)
            self._entries.append(entry)
            loop = self._polling_loop()
            if loop is not None and self._loop is not loop:
                self._loop = loop
                loop.call_soon(self._poll, loop)
            if loop is None or self._asleep:
                self._bell.put(None)
        except BaseException:  # Ctrl-C
            self._loop = None
            if entry in self._entries:
                self._bell.put(None)
            else:
                self.mailbox.launch_ended(entry)
            raise
        if interruption is not None:
            raise interruption

    def wait(self, event: Event) -> None:
        """Block the calling thread until a launch that answers no call has ended. Raises the launch's error.

        Any thread may call it. `oldest` counts the launch, so a hang is noticed. Raises the mailbox's error if the
        mailbox is closed meanwhile. So it polls: no other thread could end a wait for the event itself.
        """
        since, pause = self.clock.now(), _SHORTEST
        self._waited_for.append(since)
        try:
            while not event.done():
                reason = self.mailbox.closed
                if reason is not None:
                    raise reason
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST)
        finally:
            self._waited_for.remove(since)
        event.wait()

    def oldest(self) -> float | None:
        """The clock's reading when the oldest unfinished launch began. None if there is none."""
        began = [entry.since for entry in list(self._entries)[:1]]
        return min(began + list(self._waited_for), default=None)

    def calls(self) -> set[Call[Any]]:
        """The calls of unfinished launches. Only the thread that does the actor's work may ask."""
        return {call for entry in list(self._entries) for call in entry.calls}

    def close(self, timeout: float) -> bool:
        """End the thread once its launches are done. False if one is unfinished after ``timeout`` seconds."""
        if self._thread is None or self._thread.ident is None:
            return True
        self._closing = True
        self._bell.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _oldest(self) -> _Entry | None:
        try:
            return self._entries[0]
        except IndexError:
            return None

    def _polling_loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop that runs on the calling thread, if the last launch was brief enough to poll, else None."""
        return asyncio._get_running_loop() if self._brief else None

    def _run(self) -> None:
        with contextlib.suppress(GpuActorsError):  # the launches report why
            self.bind_thread()
        looks, waited = 0, False
        while (entry := self._oldest()) is not None or not self._closing:
            if self._interrupted:
                self._interrupted = False  # reset first: this settling may be interrupted too
                if not self._settle_what_ended():
                    self._interrupted = True
            elif entry is None:
                looks += 1
                self._sleep(None if looks > _TICKS else _TICK)
            elif self._loop is not None and not waited:  # the loop gets the first try
                waited = True
                del entry  # the loop may settle it before this thread wakes: its arrays must not live longer
                self._sleep(_TICK)
            else:
                looks, waited = 0, False
                self._wait(entry)

    def _sleep(self, seconds: float | None) -> None:
        """Sleep until the bell rings, for at most ``seconds``."""
        self._asleep = seconds is None
        self._next_look = math.inf if seconds is None else time.monotonic() + seconds
        # A launch that came before ``_asleep`` was set rang no bell.
        if seconds is not None or not (self._entries or self._closing or self._interrupted):
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=seconds)
        self._asleep, self._next_look = False, math.inf

    def _wait(self, entry: _Entry) -> None:
        """Wait for the oldest launch, and settle all that have ended."""
        began = time.monotonic()
        entry.event.failure()
        self._brief = time.monotonic() - began < _POLLED / 2
        if self._settle_what_ended():
            self._loop = None  # the loop is blocked, or has stopped
        else:
            self._sleep(_TICK)

    def _poll(self, loop: asyncio.AbstractEventLoop, since: float | None = None) -> None:
        """Settle the ended launches, on a loop's thread, and poll again soon. since: when it first saw the oldest."""
        if self._loop is not loop:
            return
        seen = self._oldest()
        self._settle_ended()
        entry, now = self._oldest(), time.monotonic()
        if now > self._next_look + _WAKING:
            # The completion thread waits for the GIL. Until it has the GIL, each call that releases the GIL wakes the
            # thread in vain, and each such wake-up takes longer than a launch.
            time.sleep(_WAKING)
        if since is None or entry is not seen:
            since = now
        if entry is None:
            self._loop = None
        elif now - since < _POLLED:
            loop.call_soon(self._poll, loop, since)
        else:
            self._loop, self._brief = None, False
            self._bell.put(None)

    def _settle_what_ended(self) -> bool:
        """`_settle_ended` for the completion thread, which must go on: an exception is logged."""
        try:
            return self._settle_ended()
        except BaseException:
            logger.exception("%s: settling a launch raised", self.name)
            return True

    def _settle_ended(self) -> bool:
        """Settle the launches that have ended, oldest first, and wake their waiters. False if another thread does so.

        On a loop's thread Ctrl-C may interrupt it between any two calls. The completion thread then settles the rest.
        """
        settles = False
        try:
            with self._lock:
                if self._settling:
                    return False
                self._settling = settles = True  # in one step, so that `finally` resets it
            while (entry := self._oldest()) is not None and (entry.over or entry.event.done()):
                self._settle_entry(entry)
            self._outbox.flush()
            return True
        except BaseException:
            self._interrupted, self._loop = True, None
            self._bell.put(None)
            raise
        finally:
            if settles:
                self._settling = False

    def _settle_entry(self, entry: _Entry) -> None:
        """Settle the oldest launch. Safe to repeat. Raises an interruption such as Ctrl-C, but no `Exception`."""
        interruption: BaseException | None = None
        if not entry.over:
            try:
                self._settle(entry.event, entry.calls, entry.finish_once, entry.failed, self._outbox)
            except BaseException as error:
                # The launches after this one must still be waited for, and the calls of this one answered.
                if isinstance(error, Exception):
                    logger.exception("%s: settling a launch raised", self.name)
                else:
                    interruption = error
                failure = ActorFailed(f"{self.name} could not finish the request: {error!r}")
                for call in entry.calls:
                    if call.state is LAUNCHED:  # the others have their answers
                        call.fail(failure, self._outbox)
        self.mailbox.launch_ended(entry)
        if self._oldest() is entry:
            self._entries.popleft()
        if interruption is not None:
            raise interruption

    def _settle(
        self, event: Event, calls: Sequence[Call[Any]], finish: Finish, failed: Failed | None, outbox: Outbox
    ) -> None:
        """Answer the calls. If Ctrl-C or an exit interrupts it, raises that once the calls are answered."""
        error = event.failure()
        interruption = None if error is None or isinstance(error, Exception) else error
        results: Sequence[Any] = ()
        if error is None:
            try:
                results = finish(event.outputs)
                if len(results) != len(calls):
                    raise ValueError(f"finish gave {len(results)} results for {len(calls)} requests")
            except BaseException as raised:
                error = raised
                interruption = None if isinstance(raised, Exception) else raised
        if error is None:
            self.progress.launch_ended(None)
            for call, result in zip(calls, results, strict=True):
                call.settle(result, None, outbox)
            return
        if type(error) is MockModeError:
            # A mock device that does not compute answers every request with this error, and a benchmark times that.
            error.__traceback__ = None
            self.progress.launch_ended(None)
        else:
            error = self._as_answer(error)
            self.progress.launch_ended(error)
        again = failed(error) if failed is not None else ()
        for call in calls:
            if call not in again:
                call.settle(None, error, outbox)
        if interruption is not None:
            raise interruption

    def _as_answer(self, error: BaseException) -> GpuActorsError:
        """The error for calls whose launch raised ``error``, or whose `Finish` did."""
        if not isinstance(error, GpuActorsError):
            logger.error("%s: a finished launch could not be answered", self.name, exc_info=error)
        # Its traceback would keep the calls alive, through frames of this module. Its message is enough.
        error.__traceback__ = None
        return as_answer(error, self.on_lost, self.name, "could not finish the request")


def as_answer(
    error: BaseException, on_lost: Callable[[ContextLost], ContextLost], name: str, failure: str
) -> GpuActorsError:
    """The error for calls that an actor could not answer because of ``error``.

    name: the actor's name.
    failure: how the actor failed, such as "could not finish the request".
    """
    if isinstance(error, GpuActorsError):
        return on_lost(error) if isinstance(error, ContextLost) else error
    return caused(ActorFailed(f"{name} {failure}: {show(error)}"), error)
