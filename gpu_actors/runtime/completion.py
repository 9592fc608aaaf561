"""Completion: the thread that waits for a stream's launches, in order, and settles their calls.

Each stream has one thread. A wait on an event releases the GIL, raises the launch's error, and batches by itself: all
launches that finished while the thread was busy are settled before the loops are woken once. A host callback from the
driver would do none of this, and it never fires after a device error.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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

Finish = Callable[[Outputs], Sequence[Any]]
"""Turns a launch's outputs into one result for each of its calls."""

Failed = Callable[[BaseException], Collection[Call[Any]]]
"""Called with the error of a failed launch. Returns the calls that it launches again, which are not failed."""


class _Entry(NamedTuple):
    event: Event
    calls: Sequence[Call[Any]]
    finish: Finish
    failed: Failed | None
    since: float


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
    _arrivals: queue.SimpleQueue[_Entry | None] = field(init=False, default_factory=queue.SimpleQueue)
    _thread: threading.Thread | None = field(init=False, default=None)
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
        """
        if self.mailbox.meter is not None:
            self.mailbox.launching(calls)
        if not self._entries and event.done():
            self.mailbox.launch_passed(len(calls))
            self._settle(event, calls, finish, failed, outbox)
            return
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"{self.name}-completion", daemon=True)
            thread.start()  # may raise: until here no launch is counted, which would never end
            self._thread = thread
        self.mailbox.launch_began(len(calls))
        entry = _Entry(event, calls, finish, failed, self.clock.now())
        self._entries.append(entry)
        self._arrivals.put(entry)

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
        if self._thread is None:
            return True
        self._arrivals.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        outbox = Outbox()
        with contextlib.suppress(GpuActorsError):  # the launches say why
            self.bind_thread()
        while (entry := self._arrivals.get()) is not None:
            try:
                self._settle(*entry[:-1], outbox)
            except BaseException as error:
                # The launches behind this one still have to be waited for, and its calls answered.
                logger.exception("%s: settling a launch raised", self.name)
                failure = ActorFailed(f"{self.name} could not finish the request: {error!r}")
                for call in entry.calls:
                    if call.state is LAUNCHED:  # the others have their answers
                        call.fail(failure, outbox)
                del call
            # A thread that waits for the next launch must not keep this one's arrays alive.
            del entry
            self._entries.popleft()
            self.mailbox.launch_ended()
            if not self._entries or not self._entries[0].event.done():
                outbox.flush()
        outbox.flush()

    def _settle(
        self, event: Event, calls: Sequence[Call[Any]], finish: Finish, failed: Failed | None, outbox: Outbox
    ) -> None:
        error = event.failure()
        results: Sequence[Any] = ()
        if error is None:
            try:
                results = finish(event.outputs)
                if len(results) != len(calls):
                    raise ValueError(f"finish gave {len(results)} results for {len(calls)} requests")
            except BaseException as raised:
                error = raised
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
