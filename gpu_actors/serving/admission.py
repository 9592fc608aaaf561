"""Admission: a bound on the work that is done at once, and a short queue in front of it.

admission = Admission(4, waiting=1024, queue_seconds=10.0)
async with admission.place(deadline):
    ...  # at most 4 of these at once

Requests that share a device slow each other down, until all of them miss their deadlines. Few therefore run at
once, the next wait in order, and a request that would wait for long is refused while its client can still go elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from numbers import Real

import anyio

from gpu_actors.clock import SYSTEM_CLOCK, Clock
from gpu_actors.errors import DeadlineExceeded, InvalidRequest, Overloaded
from gpu_actors.validation.fields import integer, real

__all__ = ["Admission", "AdmissionStats"]

_WEIGHT = 0.1
_FIRST_GUESS = 1.0
_LONGEST_RETRY = 60.0

# Seconds. A loop whose timers count milliseconds may cancel at a deadline so much before it.
_TIMER_SLACK = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionStats:
    """running, waiting: now. admitted, refused: since the start; a waiter that gave up is neither.

    service_seconds: how long a place is held, a moving average over places that were left without an error or by a
        deadline; 1 before the first.
    """

    running: int
    waiting: int
    admitted: int
    refused: int
    service_seconds: float


class Admission:
    """Places for ``running`` pieces of work at once, given out in the order in which they were asked for.

    running: places. waiting: how many may wait for one; the next is refused at once. queue_seconds: how long each may
    wait. clock: where the service time is read.

    For the tasks of one event loop. Raises `InvalidRequest` for a bound below its least or of another type.
    """

    def __init__(
        self, running: int, *, waiting: int = 1024, queue_seconds: float = 10.0, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        given: object = queue_seconds
        if isinstance(given, bool) or not isinstance(given, Real) or not queue_seconds >= 0:
            raise InvalidRequest("queue_seconds", queue_seconds, "must be a number of seconds >= 0")
        self.places: int = integer("running", running, 1)
        self.max_waiting: int = integer("waiting", waiting, 0)
        self.queue_seconds = queue_seconds
        self._clock = clock
        self._running = 0
        self._queue: dict[anyio.Event, None] = {}
        self._admitted = self._refused = 0
        self._service: float | None = None

    @asynccontextmanager
    async def place(self, deadline: float | None = None) -> AsyncIterator[None]:
        """Hold a place. A task that is cancelled while it waits leaves the queue.

        deadline: absolute ``time.monotonic()`` seconds. Raises `DeadlineExceeded` if it passes in the queue;
        `Overloaded`, with seconds after which to retry, if the queue is full, if ``queue_seconds`` pass, or at once if
        those who wait already will take longer than the deadline allows, by the measured service time; and
        `InvalidRequest` for a deadline that is not a finite number.
        """
        if deadline is not None:
            # Before the queue: a waiter that raised inside would leave its turn there, and a place would be lost.
            deadline = real("deadline", deadline, "a finite number of monotonic seconds")
        await self._enter(deadline)
        start = self._clock.now()
        try:
            yield
            self._measure(self._clock.now() - start)
        except BaseException as error:
            late = deadline is not None and time.monotonic() >= deadline - _TIMER_SLACK
            if late or isinstance(error, DeadlineExceeded):
                self._measure(self._clock.now() - start)  # or requests that miss their deadline would never count
            raise
        finally:
            self._leave()

    @property
    def retry_after(self) -> float:
        """Seconds until all that run and wait now are done, by the measured service time; 60 at most."""
        backlog = (self._running + len(self._queue)) * self._service_seconds / self.places
        return min(backlog, _LONGEST_RETRY)

    def stats(self) -> AdmissionStats:
        return AdmissionStats(
            running=self._running,
            waiting=len(self._queue),
            admitted=self._admitted,
            refused=self._refused,
            service_seconds=self._service_seconds,
        )

    @property
    def _service_seconds(self) -> float:
        return _FIRST_GUESS if self._service is None else self._service

    @property
    def _wait_ahead(self) -> float:
        """Seconds that those who wait already will take, as far as measured: less than a new request waits itself."""
        return 0.0 if self._service is None else len(self._queue) * self._service / self.places

    async def _enter(self, deadline: float | None) -> None:
        if self._running < self.places and not self._queue:
            self._running += 1
        elif len(self._queue) >= self.max_waiting:
            raise self._refusal("is full")
        elif deadline is not None and (wait := self._wait_ahead) > deadline - time.monotonic():
            raise self._refusal(f"takes about {wait:.3g} s, longer than the deadline allows")
        else:
            await self._wait(deadline)
        self._admitted += 1

    async def _wait(self, deadline: float | None) -> None:
        turn = anyio.Event()
        self._queue[turn] = None
        left = float("inf") if deadline is None else deadline - time.monotonic()
        try:
            with anyio.move_on_after(min(left, self.queue_seconds)):
                await turn.wait()
        except BaseException:
            if turn.is_set():
                self._leave()  # the place that was handed over just now
            raise
        finally:
            self._queue.pop(turn, None)
        if turn.is_set():
            return
        if left <= self.queue_seconds:
            raise DeadlineExceeded("the deadline passed in the queue")
        raise self._refusal(f"did not come to this request within {self.queue_seconds} s")

    def _leave(self) -> None:
        # Straight to the next in the queue, so that a new request does not overtake it.
        turn = next(iter(self._queue), None)
        if turn is None:
            self._running -= 1
        else:
            del self._queue[turn]
            turn.set()

    def _measure(self, seconds: float) -> None:
        before = seconds if self._service is None else self._service
        self._service = before + _WEIGHT * (seconds - before)

    def _refusal(self, what: str) -> Overloaded:
        self._refused += 1
        return Overloaded(
            f"{self._running} requests are worked on and {len(self._queue)} wait; the queue {what}", self.retry_after
        )
