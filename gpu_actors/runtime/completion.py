"""Completion: settles the calls of a stream's launches, in order, as they end.

Each stream has one thread that waits for its launches. A wait on an event releases the GIL, raises the launch's error,
and batches by itself: all launches that finished while the thread was busy are settled before the loops are woken once.
A host callback from the driver would do none of this, and it never fires after a device error.

Waking that thread, and then the loop, costs more than a brief launch. So a loop whose own thread launched looks at the
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
"""Seconds between two looks at a launch that a thread waits for."""

_POLLED = 200e-6
"""Seconds for which a loop looks at a launch: about two wake-ups of a thread."""

_TICK, _TICKS = 5e-2, 10
"""Seconds between two looks of a thread that need not be woken, and how many looks without a launch make it sleep."""

_WAKING = 1e-4
"""Seconds that a thread takes to wake. One that takes longer waits for the GIL."""

Finish = Callable[[Outputs], Sequence[Any]]
"""Turns a launch's outputs into one result for each of its calls."""

Failed = Callable[[BaseException], Collection[Call[Any]]]
"""Called with the error of a failed launch. Returns the calls that it launches again, which are not failed."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A launch. over: it is not counted as in flight yet, or no longer."""

    event: Event
    calls: Sequence[Call[Any]]
    finish: Finish
    failed: Failed | None
    since: float
    over: bool = True
    _finishing: bool = False

    def finish_once(self, outputs: Outputs) -> Sequence[Any]:
        if self._finishing:  # Ctrl-C interrupted it: what it did is not known
            raise ActorFailed("the program was interrupted while the request was finished")
        self._finishing = True
        return self.finish(outputs)


@dataclass(eq=False)
class Completion:
    """Settles the calls of one stream's launches.

    on_lost: called, on the thread that saw it, when a launch reports that the context is lost. Returns the error for
        the launch's calls.
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
    # One thread at a time settles launches, oldest first, and uses the outbox. An interrupted one leaves them to ours.
    _settling: bool = field(init=False, default=False)
    _interrupted: bool = field(init=False, default=False)
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _outbox: Outbox = field(init=False, default_factory=Outbox)
    # The loop that polls, and whether the last launch was over in so short a time, as the next one may be.
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

        They are settled at once if it is done and no earlier launch waits. For the thread that does the actor's work.
        If that is the thread of a loop, it settles what is over, and the loop polls.
        """
        if self.mailbox.meter is not None:
            self.mailbox.launching(calls)
        interruption: BaseException | None = None
        if self._entries and self._polling_loop() is not None:
            try:
                self._settle_ended()
            except BaseException as error:  # Ctrl-C is raised once this launch is known
                interruption = error
        if not self._entries and event.done():
            self.mailbox.launch_passed(len(calls))
            self._settle(event, calls, finish, failed, outbox)
            if interruption is not None:
                raise interruption
            return
        if self._thread is None or self._thread.ident is None:  # an interrupted start may not have begun
            self._thread = threading.Thread(target=self._run, name=f"{self.name}-completion", daemon=True)
            try:
                self._thread.start()  # until here no launch is counted, which would never end
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
        """Block the calling thread, any, until a launch that answers no call is over. Raises its error.

        One that hangs counts as the others do, and this thread looks whether the context is lost meanwhile: no other
        thread could end a wait for the event itself.
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
        """The calls of unfinished launches. For the thread that does the actor's work."""
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
        """The loop of this thread, if it polls for what the thread launches."""
        return asyncio._get_running_loop() if self._brief else None

    def _run(self) -> None:
        with contextlib.suppress(GpuActorsError):  # the launches say why
            self.bind_thread()
        looks, waited = 0, False
        while (entry := self._oldest()) is not None or not self._closing:
            if self._interrupted:
                self._interrupted = False  # first: what is settled now may be interrupted too
                if not self._settle_what_ended():
                    self._interrupted = True
            elif entry is None:
                looks += 1
                self._sleep(None if looks > _TICKS else _TICK)
            elif self._loop is not None and not waited:  # the loop comes first
                waited = True
                del entry  # the loop may be done with its arrays before this thread wakes
                self._sleep(_TICK)
            else:
                looks, waited = 0, False
                self._wait(entry)

    def _sleep(self, seconds: float | None) -> None:
        """Sleep until the bell rings, at most so long."""
        self._asleep = seconds is None
        self._next_look = math.inf if seconds is None else time.monotonic() + seconds
        # A launch that came before this thread was known to sleep rang no bell.
        if seconds is not None or not (self._entries or self._closing or self._interrupted):
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=seconds)
        self._asleep, self._next_look = False, math.inf

    def _wait(self, entry: _Entry) -> None:
        """Wait for the oldest launch, and settle those that are over."""
        began = time.monotonic()
        entry.event.failure()
        self._brief = time.monotonic() - began < _POLLED / 2
        if self._settle_what_ended():
            self._loop = None  # it is blocked, or it has stopped
        else:
            self._sleep(_TICK)

    def _poll(self, loop: asyncio.AbstractEventLoop, since: float | None = None) -> None:
        """Settle what is over, on a loop's thread, and look again soon. since: when it first saw the oldest launch."""
        if self._loop is not loop:
            return
        seen = self._oldest()
        self._settle_ended()
        entry, now = self._oldest(), time.monotonic()
        if now > self._next_look + _WAKING:
            # Until the thread has the GIL, each call that releases it wakes the thread in vain, and that takes longer
            # than a launch.
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
        """`_settle_ended` for the thread, which goes on whatever a launch raises."""
        try:
            return self._settle_ended()
        except BaseException:
            logger.exception("%s: settling a launch raised", self.name)
            return True

    def _settle_ended(self) -> bool:
        """Settle the launches that are over, oldest first, and wake those who wait. False if another thread does so.

        On a loop's thread Ctrl-C may interrupt it between any two calls. The thread does then what is left.
        """
        settles = False
        try:
            with self._lock:
                if self._settling:
                    return False
                self._settling = settles = True  # in one step, so that it is given back
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
        """Settle the oldest launch. May be done twice. Raises what interrupted it, and no `Exception`."""
        interruption: BaseException | None = None
        if not entry.over:
            try:
                self._settle(entry.event, entry.calls, entry.finish_once, entry.failed, self._outbox)
            except BaseException as error:
                # The launches behind this one still have to be waited for, and its calls answered.
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
        """Answer the calls. Raises the Ctrl-C, or the exit, that interrupted it, once they are answered."""
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
            # A mock device that does not compute answers every request so, and a benchmark times that.
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
        # Its traceback refers through frames of this module to the calls. Its message says all.
        error.__traceback__ = None
        return as_answer(error, self.on_lost, self.name, "could not finish the request")


def as_answer(
    error: BaseException, on_lost: Callable[[ContextLost], ContextLost], name: str, failure: str
) -> GpuActorsError:
    """The error for calls that an actor could not answer because of ``error``.

    name: of the actor.
    failure: what the actor failed in, such as "could not finish the request".
    """
    if isinstance(error, GpuActorsError):
        return on_lost(error) if isinstance(error, ContextLost) else error
    return caused(ActorFailed(f"{name} {failure}: {show(error)}"), error)
