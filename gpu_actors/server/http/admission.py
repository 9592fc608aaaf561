"""Admission: a bound on the work that runs at once, and a short queue for further work.

admission = Admission(4, waiting=1024, queue_seconds=10.0)
async with admission.place(deadline):
    ...  # at most 4 of these at once

Requests that share a device slow each other down, until all of them miss their deadlines. So the measured throughput
decides how many run at once. A request is admitted if the queue and its own work are predicted to end before its
deadline. Otherwise it is refused while its client can still try another server. Admitted work runs to its end.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from numbers import Real

import anyio

from gpu_actors.clock import SYSTEM_CLOCK, TIMER_SLACK, Clock
from gpu_actors.errors import DeadlineExceeded, InvalidRequest, Overloaded
from gpu_actors.fields import expect, integer, real
from gpu_actors.server.http.concurrency import ConcurrencyLimit
from gpu_actors.server.http.fair_queue import FairQueue, Waiter

__all__ = ["Admission", "AdmissionStats", "Place"]

_WEIGHT = 0.1
_SLOW = 0.01
_FIRST_GUESS = 1.0
_LONGEST_RETRY = 60.0

_FIRST_ERROR, _LEAST_ERROR = 0.25, 0.2
"""The relative error that is assumed of a predicted time before any measurement, and its least value."""

_SPARE = 4
"""The limit divided by this, but at least 1, is how many extra places clients without a place, and short work, may get.
Short work costs at most the running work's mean divided by this."""

_REFUSALS_A_SECOND = 60.0
"""The most refusals per second, or one per turn of the loop if that is less. Clients that retry at once must not take
the time of admitted requests."""

_BURST = 10.0
"""Refusals for this many seconds may go out at once."""

_LONGEST_DELAY = 10.0
"""The most seconds that a request waits for its refusal."""

_LEAST_WORK, _MOST_WORK = 1e-9, 1e15
_UNITS = f"a number from {_LEAST_WORK:g} to {_MOST_WORK:g}"
_MOST_PRIORITY = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionStats:
    """Counts of an `Admission`.

    running: requests that hold a place now.
    waiting: requests that wait for one now.
    admitted, refused: requests since the start. A request that is cancelled or late in the queue counts as
        neither.
    service_seconds: how long a place is held: a moving average over places that ended without an error or by a
        deadline; 1 before the first.
    limit: how many requests may run at once, by the measured throughput.
    """

    running: int
    waiting: int
    admitted: int
    refused: int
    service_seconds: float
    limit: int


class Place:
    """A place that a piece of work holds. The holder may report the progress of its work before the work ends."""

    __slots__ = ("_admission", "_area", "_done", "_since", "began", "client", "cost", "foretold")

    def __init__(self, admission: Admission, waiter: Waiter, foretold: float | None) -> None:
        self.cost = waiter.cost
        self.client = waiter.client
        self.foretold = foretold
        self.began, self._area = admission._advance()
        self._admission = admission
        self._since = self.began
        self._done = 0.0

    def did(self, units: float) -> None:
        """Report units completed since the last call. Raises `InvalidRequest` as `Admission.place` does."""
        units = _work("units", units)
        self._done += units
        now, area = self._admission._advance()
        if now > self._since:
            self._admission._record(self, (now - self._since) / units, units, area - self._area, now - self._since)
            if self._admission._room() > 0:
                self._admission._admit_next()
        self._since, self._area = now, area

    def _end(self, late: bool) -> None:
        admission = self._admission
        now, area = admission._advance()
        admission._measure(now - self.began, self, 0.0 if late else self._done)
        if not self._done:
            unit = (now - self._since) / self.cost
            if late:
                # How long the work would have taken is not known. It counts as twice the time, as does a packet without
                # an answer (Karn and Partridge, "Improving round-trip time estimates in reliable transport protocols",
                # 1987).
                unit = max(2 * unit, admission._concurrency.unit_seconds(admission._running, now) or 0.0)
            admission._record(self, unit, self.cost, area - self._area, now - self._since)


class Admission:
    """Places for at most ``running`` pieces of work at once, given out fairly.

    running: the most places. Fewer are used if their measured throughput is as good, since each piece of work then
        takes less time.
    waiting: how many requests may wait for a place; further ones are refused at once.
    queue_seconds: how long each request may wait.
    per_client: the most requests of one client that run, wait or are being read. None: no limit.
    weights: by client name; 1 for absent ones. A client of weight 2 gets twice the share of a client of
        weight 1 while both wait.
    clock: measures the service time.

    Clients take turns by the cost of their work (Goyal, Vin and Cheng, "Start-time fair queueing", 1996). Within one
    client short work goes before long work, until other work of the long work's cost has been admitted. A few places
    above the limit are for clients that hold no place, and for work that is much shorter than the running work.

    Only the tasks of one event loop may use it. Raises `InvalidRequest` for a bound that is too small or of another
    type.
    """

    def __init__(
        self,
        running: int,
        *,
        waiting: int = 1024,
        queue_seconds: float = 10.0,
        per_client: int | None = None,
        weights: Mapping[str, float] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        value: object = queue_seconds
        if isinstance(value, bool) or not isinstance(value, Real) or not queue_seconds >= 0:
            raise InvalidRequest("queue_seconds", queue_seconds, "must be a number of seconds >= 0")
        self.places: int = integer("running", running, 1)
        self.max_waiting: int = integer("waiting", waiting, 0)
        self.queue_seconds = queue_seconds
        self.per_client: int | None = None if per_client is None else integer("per_client", per_client, 1)
        self._clock = clock
        self._queue = FairQueue(_weights(weights or {}))
        self._concurrency = ConcurrencyLimit(self.places)
        self._running = 0
        self._cost_running = 0.0
        self._admitted = self._refused = 0
        self._service: float | None = None
        self._prediction_error = _FIRST_ERROR
        self._done_share = 1.0
        self._area, self._advanced = 0.0, clock.now()
        self._spare = 0
        self._delayed: deque[anyio.Event] = deque()
        self._next_retry = self._next_refusal = 0.0

    @asynccontextmanager
    async def reading(self, deadline: float | None = None, *, client: str = "") -> AsyncIterator[None]:
        """Enter this to read a request of unknown cost: to parse its body, to count its tokens. Then call `place`.

        A request is refused before it is read if the queue takes longer than its deadline allows. The queue includes
        the requests that are being read: all of this client, and up to as many of each other client. Receive the whole
        body first, since a client that sends it slowly would keep others out.

        deadline, client: as for `place`.

        Raises `Overloaded`, and `InvalidRequest` for a malformed deadline.
        """
        if deadline is not None:
            deadline = real("deadline", deadline, "a finite number of monotonic seconds")
        await self._refuse_unless_it_fits(Waiter(0.0, deadline, client, 0))
        self._queue.begin_reading(client)
        try:
            yield
        finally:
            self._queue.end_reading(client)

    @asynccontextmanager
    async def place(
        self, deadline: float | None = None, *, cost: float = 1.0, client: str = "", priority: int = 0
    ) -> AsyncIterator[Place]:
        """Wait for a place, and hold it while this is entered. A task that is cancelled in the queue leaves it.

        deadline: absolute ``time.monotonic()`` seconds.
        cost: the amount of work, in any unit, from 1e-9 to 1e15. The time that a unit takes is measured.
        client: the name of the client whose turn this takes.
        priority: a higher one goes earlier. One step counts as much as the work of all places together, so a request
            of lower priority that has waited longer than that still goes first.

        Raises `DeadlineExceeded` if the deadline passes in the queue, and `InvalidRequest` for a malformed deadline,
        cost or priority. Raises `Overloaded`, with seconds after which to retry, if the queue is full, if the client
        has ``per_client`` requests under way, if ``queue_seconds`` pass, or if the work would not end by the deadline,
        which is checked at once and when its turn comes.
        """
        if deadline is not None:
            # Checked before the queue: an error inside would leave the waiter there and lose a place.
            deadline = real("deadline", deadline, "a finite number of monotonic seconds")
        cost = _work("cost", cost)
        if type(priority) is not int or abs(priority) > _MOST_PRIORITY:
            raise InvalidRequest("priority", priority, f"must be an int from -{_MOST_PRIORITY} to {_MOST_PRIORITY}")
        waiter = Waiter(cost, deadline, client, priority)
        if deadline is not None and time.monotonic() >= deadline:
            raise DeadlineExceeded("the deadline passed before the work could begin")
        await self._refuse_unless_it_fits(waiter)
        if self._room(waiter) > 0:
            self._begin(waiter)
        else:
            await self._wait(waiter)
        place = Place(self, waiter, self._own_seconds(cost, self._running))
        try:
            yield place
            place._end(False)
        except BaseException as error:
            late = deadline is not None and time.monotonic() >= deadline - TIMER_SLACK
            if late or isinstance(error, DeadlineExceeded):
                place._end(True)  # otherwise missed deadlines would never count
            raise
        finally:
            self._leave(waiter)

    @property
    def retry_after(self) -> float:
        """Predicted seconds, 60 at most, until all requests that run or wait now have ended."""
        units = self._cost_running + self._queue.cost
        return min(units * self._unit(), _LONGEST_RETRY)

    def stats(self) -> AdmissionStats:
        return AdmissionStats(
            running=self._running,
            waiting=len(self._queue),
            admitted=self._admitted,
            refused=self._refused,
            service_seconds=_FIRST_GUESS if self._service is None else self._service,
            limit=self._concurrency.limit,
        )

    # Measurements

    def _advance(self) -> tuple[float, float]:
        """Return the time now, and the integral over time of the number of running pieces."""
        now = self._clock.now()
        self._area += self._running * (now - self._advanced)
        self._advanced = now
        return now, self._area

    def _record(self, place: Place, unit: float, units: float, area: float, seconds: float) -> None:
        pieces = area / seconds if seconds else float(self._running)
        self._concurrency.record(pieces, unit, min(1.0, units / place.cost), self._service or 0.0, self._advanced)

    def _measure(self, seconds: float, place: Place, done: float) -> None:
        before = seconds if self._service is None else self._service
        self._service = before + _WEIGHT * (seconds - before)
        if done:
            self._done_share += _SLOW * (min(1.0, done / place.cost) - self._done_share)
        if place.foretold:
            error = min(1.0, abs(seconds / place.foretold - 1.0))
            self._prediction_error += _WEIGHT * (error - self._prediction_error)

    def _own_seconds(self, cost: float, pieces: int) -> float | None:
        """Predicted seconds of the work itself, without the queue, while ``pieces`` pieces run. None: not known."""
        unit = self._concurrency.unit_seconds(pieces, self._clock.now())
        return None if unit is None else cost * self._done_share * unit

    def _unit(self) -> float:
        """Seconds per unit of work at the rate of all places together."""
        pieces = self._concurrency.limit
        unit = self._concurrency.unit_seconds(pieces, self._clock.now())
        return _FIRST_GUESS / pieces if unit is None else self._done_share * unit / pieces

    @property
    def _mean(self) -> float:
        """The mean cost of the running pieces."""
        return self._cost_running / max(self._running, 1)

    # Who is admitted

    def _room(self, waiter: Waiter | None = None, ahead: float = 0) -> int:
        """The number of free places, in general or for this waiter. ahead: how many other requests are served first."""
        limit = self._concurrency.room(self._clock.now())
        if self._running + ahead < limit or waiter is None:
            return limit - self._running
        spare = min(self.places - self._running, max(1, limit // _SPARE) - self._spare)
        return spare if spare > 0 and self._may_have_spare(waiter) else 0

    def _may_have_spare(self, waiter: Waiter) -> bool:
        if not self._running:
            return False
        return not self._queue.held(waiter.client) or waiter.cost * _SPARE <= self._mean

    def _fits(self, cost: float, deadline: float | None, wait: float) -> bool:
        now = self._clock.now()
        if deadline is None or (not self._running and not self._concurrency.is_fresh(now)):
            return True  # if nothing runs, one piece is tried, since the measurements may be outdated
        left = deadline - time.monotonic()
        seconds = self._own_seconds(cost, min(self._running + 1, max(self._concurrency.limit, self._running)))
        if seconds is None or wait + seconds * (1 + max(self._prediction_error, _LEAST_ERROR)) <= left:
            return True
        # Work that cannot end by its deadline even if it runs alone, such as an endless stream, may have a free place.
        return not wait and cost * self._done_share * self._concurrency.unit_seconds_alone() > left

    def _refusal(self, waiter: Waiter) -> str | None:
        """The reason why a request would be refused now, or None."""
        requests = self._queue.under_way(waiter.client)
        if self.per_client is not None and requests >= self.per_client:
            return f"has {requests} requests of this client, as many as it may have"
        wait, ahead = 0.0, self._queue.read_ahead(waiter.client)
        if self._room(waiter, ahead) <= 0:
            self._concurrency.record_demand()
            if len(self._queue) >= self.max_waiting:
                return "is full"
            if self._concurrency.unit_seconds(1, self._clock.now()) is None:
                return None
            wait = (self._queue.ahead(waiter) + (ahead + 1) * self._mean) * self._unit()
        if self._fits(waiter.cost, waiter.deadline, wait):
            return None
        self._concurrency.record_demand()
        return f"takes about {wait:.3g} s, and with the request's own time that is longer than the deadline allows"

    async def _refuse_unless_it_fits(self, waiter: Waiter) -> None:
        """Raise `Overloaded` for a request that does not fit. If very many are refused, each refusal is delayed."""
        refusal = self._refusal(waiter)
        if refusal is None:
            return
        now = time.monotonic()
        self._next_refusal = max(self._next_refusal, now - _BURST) + 1 / _REFUSALS_A_SECOND
        if self._delayed or self._next_refusal > now:
            await self._delay_refusal()
            # A place may have become free meanwhile.
            late = waiter.deadline is not None and time.monotonic() >= waiter.deadline
            refusal = "was longer than the deadline allows" if late else self._refusal(waiter)
        if refusal is not None:
            raise self._refused_with(refusal)

    async def _delay_refusal(self) -> None:
        """Wait until the refusals before this one have gone out, or until a place is free."""
        event = anyio.Event()
        self._delayed.append(event)
        try:
            if self._delayed[0] is not event:
                with anyio.move_on_after(_LONGEST_DELAY):
                    await event.wait()
            if self._delayed and self._delayed[0] is event:
                await anyio.sleep(1 / _REFUSALS_A_SECOND)
        finally:
            if event in self._delayed:
                self._delayed.remove(event)
            if self._delayed:
                self._delayed[0].set()

    def _begin(self, waiter: Waiter) -> None:
        waiter.spare = self._room() <= 0
        self._advance()
        self._running += 1
        self._spare += waiter.spare
        self._cost_running += waiter.cost
        self._admitted += 1
        self._queue.begin(waiter)

    async def _wait(self, waiter: Waiter) -> None:
        event = waiter.decided = anyio.Event()
        self._queue.add(waiter, self._concurrency.limit * self._mean)
        left = math.inf if waiter.deadline is None else waiter.deadline - time.monotonic()
        try:
            with anyio.move_on_after(min(left, self.queue_seconds)):
                await event.wait()
        except BaseException:
            if waiter.admitted:
                self._leave(waiter)  # gives back the place that was just handed over
            raise
        finally:
            self._queue.remove(waiter)
        if waiter.admitted:
            return
        if waiter.refusal is not None:
            raise waiter.refusal
        if left <= self.queue_seconds:
            raise DeadlineExceeded("the deadline passed in the queue")
        raise self._refused_with(f"did not come to this request within {self.queue_seconds} s")

    def _leave(self, waiter: Waiter) -> None:
        self._advance()
        self._running -= 1
        self._spare -= waiter.spare
        # Sums of floats of different magnitudes leave a remainder.
        self._cost_running = self._cost_running - waiter.cost if self._running else 0.0
        self._queue.end(waiter)
        self._admit_next()
        if len(self._delayed) > 1 and not len(self._queue):
            self._delayed.pop().set()  # the latest request has the most time left

    def _admit_next(self) -> None:
        # The place goes straight to the next request in the queue, so that a new request does not overtake it.
        while len(self._queue):
            following = self._queue.next(None if self._room() > 0 else lambda waiter: self._room(waiter) > 0)
            if following is None:
                return
            self._queue.remove(following)
            if self._fits(following.cost, following.deadline, 0.0):
                self._begin(following)
            else:
                following.refusal = self._refused_with("was longer than foretold: the work would miss its deadline")
            assert following.decided is not None
            following.decided.set()

    def _refused_with(self, reason: str) -> Overloaded:
        self._refused += 1
        # Each refused request gets its own time to retry. Otherwise all of them would return together.
        now = time.monotonic()
        self._next_retry = max(self._next_retry, now + self.retry_after)
        retry = min(self._next_retry - now, _LONGEST_RETRY)
        self._next_retry = now + retry + self._mean * self._unit()
        return Overloaded(
            f"{self._running} requests are worked on and {len(self._queue)} wait; the queue {reason}", retry
        )


def _work(name: str, units: float) -> float:
    number = real(name, units, _UNITS)
    expect(_LEAST_WORK <= number <= _MOST_WORK, name, units, f"must be {_UNITS}")
    return number


def _weights(weights: Mapping[str, float]) -> dict[str, float]:
    checked = {}
    for client, weight in weights.items():
        checked[client] = real(f"weights[{client!r}]", weight, "a finite number > 0")
        expect(checked[client] > 0, f"weights[{client!r}]", weight, "must be a finite number > 0")
    return checked
