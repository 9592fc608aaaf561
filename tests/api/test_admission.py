"""Admission: few at once, the others in order and not for long."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

import gpu_actors as ga
from gpu_actors.serving import Admission
from gpu_actors.testing import MockClock


class Crowd:
    """Tasks that hold a place until they are let go, and the order in which they got it."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.entered: list[int] = []
        self.let_go: dict[int, asyncio.Event] = {}

    async def join(self, number: int, deadline: float | None = None) -> asyncio.Task[None]:
        """Begin a task; it holds a place or waits for one when this returns."""
        self.let_go[number] = asyncio.Event()
        task = asyncio.ensure_future(self._hold(number, deadline))
        await settled()
        return task

    async def _hold(self, number: int, deadline: float | None) -> None:
        async with self.admission.place(deadline):
            self.entered.append(number)
            await self.let_go[number].wait()


async def settled() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_few_run_at_once_and_the_others_follow_in_order() -> None:
    crowd = Crowd(Admission(2, queue_seconds=600))
    tasks = [await crowd.join(number) for number in range(6)]
    assert crowd.entered == [0, 1]
    stats = crowd.admission.stats()
    assert (stats.running, stats.waiting, stats.admitted) == (2, 4, 2)
    for number in range(6):
        crowd.let_go[number].set()
        await settled()
        assert crowd.entered == list(range(min(6, number + 3)))
    await asyncio.gather(*tasks)
    stats = crowd.admission.stats()
    assert (stats.running, stats.waiting, stats.admitted, stats.refused) == (0, 0, 6, 0)


async def test_a_newcomer_does_not_pass_those_who_wait() -> None:
    crowd = Crowd(Admission(1, queue_seconds=600))
    tasks = [await crowd.join(number) for number in range(2)]
    crowd.let_go[0].set()
    crowd.let_go[2] = asyncio.Event()
    tasks.append(asyncio.ensure_future(crowd._hold(2, None)))
    await settled()
    assert crowd.entered == [0, 1]
    crowd.let_go[1].set()
    crowd.let_go[2].set()
    await asyncio.gather(*tasks)
    assert crowd.entered == [0, 1, 2]


async def test_one_more_than_may_wait_is_refused_at_once_with_the_time_that_the_backlog_takes() -> None:
    clock = MockClock()
    crowd = Crowd(Admission(2, waiting=3, queue_seconds=600, clock=clock))
    await measured(crowd, clock, 4.0)
    tasks = [await crowd.join(number) for number in range(5)]
    with pytest.raises(ga.Overloaded, match="2 requests are worked on and 3 wait; the queue is full") as caught:
        async with crowd.admission.place():
            raise AssertionError("admitted")
    assert caught.value.retry_after == 5 * 4.0 / 2
    assert crowd.admission.stats().refused == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def measured(crowd: Crowd, clock: MockClock, seconds: float) -> None:
    task = await crowd.join(-1)
    clock.advance(seconds)
    crowd.let_go[-1].set()
    await task
    crowd.entered.clear()


async def test_the_service_time_follows_what_was_measured_and_counts_a_deadline_but_no_failure() -> None:
    clock = MockClock()
    admission = Admission(1, clock=clock)
    assert admission.stats().service_seconds == 1.0
    for seconds in (4.0, 4.0, 14.0):
        async with admission.place():
            clock.advance(seconds)
    assert admission.stats().service_seconds == pytest.approx(5.0)

    async def ends_by(error: Exception) -> None:
        async with admission.place():
            clock.advance(15.0)
            raise error

    with pytest.raises(ZeroDivisionError):
        await ends_by(ZeroDivisionError())
    assert admission.stats().service_seconds == pytest.approx(5.0)
    with pytest.raises(ga.DeadlineExceeded):
        await ends_by(ga.DeadlineExceeded("late"))
    assert admission.stats().service_seconds == pytest.approx(6.0)
    assert admission.stats().running == 0
    crowd = Crowd(admission)
    task = await crowd.join(0)
    clock.advance(1e6)
    crowd.let_go[0].set()
    await task
    crowd.let_go[1] = asyncio.Event()
    task = await crowd.join(1)
    assert admission.retry_after == 60.0
    crowd.let_go[1].set()
    await task


async def test_a_wait_ends_by_its_own_bound_and_by_the_deadline() -> None:
    crowd = Crowd(Admission(1, queue_seconds=0.05))
    holder = await crowd.join(0)
    with pytest.raises(ga.Overloaded, match=r"did not come to this request within 0\.05 s"):
        await crowd._hold(1, time.monotonic() + 600)
    crowd.admission.queue_seconds = 600
    with pytest.raises(ga.DeadlineExceeded, match="passed in the queue"):
        await crowd._hold(2, time.monotonic() + 0.05)
    assert crowd.admission.stats().waiting == 0
    crowd.let_go[0].set()
    await holder
    assert crowd.admission.stats().running == 0
    assert crowd.entered == [0]


async def test_a_request_whose_turn_would_come_after_its_deadline_is_refused_at_once() -> None:
    clock = MockClock()
    crowd = Crowd(Admission(2, queue_seconds=600, clock=clock))
    await measured(crowd, clock, 40.0)
    tasks = [await crowd.join(number) for number in range(5)]
    with pytest.raises(ga.Overloaded, match="the queue takes about 60 s, longer than the deadline allows") as caught:
        await crowd._hold(5, time.monotonic() + 59)
    assert caught.value.retry_after == 60.0
    tasks.append(await crowd.join(6, time.monotonic() + 300))
    stats = crowd.admission.stats()
    assert (stats.running, stats.waiting, stats.refused) == (2, 4, 1)
    await all_leave(crowd, tasks)


async def test_nothing_is_foretold_from_a_guess_or_to_the_first_in_the_queue() -> None:
    clock = MockClock()
    crowd = Crowd(Admission(1, queue_seconds=600, clock=clock))
    # The guess of 1 s a request would make 38 s for the last one.
    tasks = [await crowd.join(number, time.monotonic() + 30) for number in range(40)]
    assert crowd.admission.stats().waiting == 39
    await all_leave(crowd, tasks)
    await measured(crowd, clock, 1e6)
    tasks = [await crowd.join(number, time.monotonic() + 30) for number in range(2)]
    assert crowd.admission.stats().waiting == 1
    await all_leave(crowd, tasks)
    assert crowd.admission.stats().refused == 0


async def all_leave(crowd: Crowd, tasks: list[asyncio.Task[None]]) -> None:
    for event in crowd.let_go.values():
        event.set()
    await asyncio.gather(*tasks)


async def test_a_waiter_that_is_cancelled_leaves_the_queue() -> None:
    crowd = Crowd(Admission(1, queue_seconds=600))
    holder, gone, last = [await crowd.join(number) for number in range(3)]
    gone.cancel()
    await settled()
    assert crowd.admission.stats().waiting == 1
    crowd.let_go[0].set()
    crowd.let_go[2].set()
    await asyncio.gather(holder, last)
    assert crowd.entered == [0, 2]
    assert crowd.admission.stats().running == 0


async def test_a_waiter_that_is_cancelled_as_its_turn_comes_hands_the_place_on() -> None:
    crowd = Crowd(Admission(1, queue_seconds=600))
    holder, gone, last = [await crowd.join(number) for number in range(3)]
    crowd.admission._leave()  # the holder's place: the turn of `gone` has come, and it has not run since
    gone.cancel()
    await settled()
    assert gone.cancelled()
    assert crowd.entered == [0, 2]
    crowd.admission._running += 1  # for the holder, who is still to leave
    for number in (0, 2):
        crowd.let_go[number].set()
    await asyncio.gather(holder, last)
    assert crowd.admission.stats().running == 0


@pytest.mark.parametrize("deadline", [float("nan"), float("inf"), "soon", True])
@pytest.mark.parametrize("places", ["free", "taken"])
async def test_a_deadline_that_is_no_time_is_refused_and_takes_no_place(deadline: Any, places: str) -> None:
    crowd = Crowd(Admission(1, queue_seconds=600))
    holders = [await crowd.join(0)] if places == "taken" else []
    with pytest.raises(ga.InvalidRequest) as caught:
        await crowd._hold(1, deadline)
    assert caught.value.field == "deadline"
    for holder in holders:
        crowd.let_go[0].set()
        await holder
    assert crowd.admission.stats().running == 0
    assert crowd.admission.stats().waiting == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("running", 0),
        ("running", 1.5),
        ("running", "4"),
        ("running", True),
        ("waiting", -1),
        ("waiting", None),
        ("queue_seconds", float("nan")),
        ("queue_seconds", None),
    ],
)
def test_bounds_below_their_least_or_of_another_type_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ga.InvalidRequest) as caught:
        Admission(**{"running": 1, name: value})
    assert caught.value.field == name
