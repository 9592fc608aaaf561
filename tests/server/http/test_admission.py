"""Admission: a few requests run at once, and the others wait in order for a limited time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest

import gpu_actors as ga
from gpu_actors.serving import Admission
from gpu_actors.testing import MockClock


class Crowd:
    """Tasks that hold a place until they are let go, and the order in which they got one."""

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
        if number == 0:  # a newcomer does not pass waiting requests
            crowd.let_go[6] = asyncio.Event()
            tasks.append(asyncio.ensure_future(crowd._hold(6, None)))
        await settled()
        assert crowd.entered == list(range(min(7, number + 3)))
    await all_leave(crowd, tasks)
    stats = crowd.admission.stats()
    assert (stats.running, stats.waiting, stats.admitted, stats.refused) == (0, 0, 7, 0)


async def test_one_more_than_may_wait_is_refused_at_once_with_the_time_that_the_backlog_takes() -> None:
    clock = MockClock()
    crowd = Crowd(Admission(2, waiting=3, queue_seconds=600, clock=clock))
    await measured(crowd, clock, 4.0)
    tasks = [await crowd.join(number) for number in range(5)]
    with pytest.raises(ga.Overloaded, match="2 requests are worked on and 3 wait; the queue is full") as caught:
        async with crowd.admission.place():
            raise AssertionError("admitted")
    # Until it is measured, two at once count as half as fast each.
    assert caught.value.retry_after == 5 * 4.0
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
    with pytest.raises(ga.Overloaded, match=r"the queue takes about 160 s, and with .* own time") as caught:
        await crowd._hold(5, time.monotonic() + 159 + 80)
    assert caught.value.retry_after == pytest.approx(60.0)
    tasks.append(await crowd.join(6, time.monotonic() + 161 + 80 * 1.25))
    stats = crowd.admission.stats()
    assert (stats.running, stats.waiting, stats.refused) == (2, 4, 1)
    await all_leave(crowd, tasks)


async def test_nothing_is_foretold_from_a_guess_or_to_one_that_would_run_alone() -> None:
    clock = MockClock()
    crowd = Crowd(Admission(1, queue_seconds=600, clock=clock))
    # By the guess of 1 s a request, the last one would take 38 s.
    tasks = [await crowd.join(number, time.monotonic() + 30) for number in range(40)]
    assert crowd.admission.stats().waiting == 39
    await all_leave(crowd, tasks)
    assert crowd.admission.stats().refused == 0
    await measured(crowd, clock, 1e6)
    tasks = [await crowd.join(0, time.monotonic() + 30)]
    with pytest.raises(ga.Overloaded):
        await crowd._hold(1, time.monotonic() + 30)
    await all_leave(crowd, tasks)


async def all_leave(crowd: Crowd, tasks: list[asyncio.Task[None]]) -> None:
    for event in crowd.let_go.values():
        event.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("turn", [False, True], ids=["while it waits", "as its turn comes"])
async def test_a_waiter_that_is_cancelled_hands_the_place_on(turn: bool) -> None:
    crowd = Crowd(Admission(1, queue_seconds=600))
    holder, gone, last = [await crowd.join(number) for number in range(3)]
    if turn:
        crowd.let_go[0].set()
        await asyncio.sleep(0)
        assert crowd.admission.stats().admitted == 2, "the turn of `gone` has come, and it has not run since"
    gone.cancel()
    await settled()
    assert gone.cancelled()
    assert turn or crowd.admission.stats().waiting == 1
    crowd.let_go[0].set()
    crowd.let_go[2].set()
    await asyncio.gather(holder, last)
    assert crowd.entered == [0, 2]
    assert crowd.admission.stats().running == 0


@pytest.mark.parametrize("holders", [0, 1], ids=["free", "taken"])
async def test_what_is_no_deadline_cost_or_priority_is_refused_and_takes_no_place(holders: int) -> None:
    crowd = Crowd(Admission(1, queue_seconds=600))
    tasks = [await crowd.join(number) for number in range(holders)]
    for deadline in (float("nan"), float("inf"), "soon", True):
        with pytest.raises(ga.InvalidRequest) as caught:
            await crowd._hold(1, deadline)
        assert caught.value.field == "deadline"
    for wrong in WRONG:
        with pytest.raises(ga.InvalidRequest) as caught:
            async with crowd.admission.place(**wrong):
                raise AssertionError("admitted")
        assert [caught.value.field] == list(wrong)
    stats = crowd.admission.stats()
    assert (stats.running, stats.waiting) == (holders, 0)
    await all_leave(crowd, tasks)
    async with crowd.admission.place() as place:
        for units in (0, -1.0, 1e-300, float("nan"), "1", True):
            with pytest.raises(ga.InvalidRequest, match="units"):
                place.did(units)


def test_bounds_below_their_least_or_of_another_type_are_refused_by_name() -> None:
    wrong: dict[str, list[Any]] = {"running": [0, 1.5, "4", True], "waiting": [-1, None], "per_client": [0, 1.5]}
    wrong["queue_seconds"] = [float("nan"), None]
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ga.InvalidRequest) as caught:
                Admission(**{"running": 1, name: value})
            assert caught.value.field == name
    for weight in (0, -1.0, float("nan"), "2", None):
        with pytest.raises(ga.InvalidRequest, match=r"weights\['a'\]"):
            Admission(1, weights={"a": weight})


WRONG: list[dict[str, Any]] = [
    *({"cost": cost} for cost in (0, -1, 1e-300, 1e300, float("inf"), float("nan"), "1", None)),
    *({"priority": priority} for priority in (1.0, True, None, 10**400)),
]


async def test_a_client_has_no_more_than_its_share_of_places_and_waits() -> None:
    admission = Admission(2, per_client=2)
    async with admission.place(client="a"), admission.place(client="a"):
        with pytest.raises(ga.Overloaded, match="2 requests of this client"):
            async with admission.reading(client="a"):
                raise AssertionError("read")
        waiting = asyncio.ensure_future(_held(admission, "b"))
        await settled()
        assert admission.stats().waiting == 1
    await waiting


async def _read(admission: Admission, client: str, deadline: float | None = None) -> None:
    async with admission.reading(deadline, client=client):
        await asyncio.Event().wait()


async def test_what_is_read_of_a_client_is_part_of_its_share() -> None:
    admission = Admission(256, per_client=4)
    tasks = [asyncio.ensure_future(_read(admission, "a")) for _ in range(4)]
    await settled()
    for enter in (admission.reading, admission.place):
        with pytest.raises(ga.Overloaded, match="4 requests of this client"):
            async with enter(client="a"):
                raise AssertionError("let in")
    async with admission.reading(client="b"), admission.place(client="c"):
        pass
    tasks.pop().cancel()
    await settled()
    async with admission.reading(client="a"):
        pass
    await _cancelled(tasks)
    assert admission._queue._clients == {}


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(("weight", "clients"), [(1.0, 1), (4.0, 1), (1.0, 100)])
async def test_what_is_read_of_one_client_keeps_no_other_out_and_that_of_many_goes_first(
    weight: float, clients: int
) -> None:
    clock = MockClock()
    admission = Admission(8, weights={"b": weight}, clock=clock)
    for _ in range(20):
        async with admission.place(client="b"):
            clock.advance(1.0)
    async with admission.place(client="b"):
        tasks = [asyncio.ensure_future(_read(admission, str(number % clients))) for number in range(300)]
        await settled()
        for door in (admission.reading, admission.place)[clients > 1 :]:
            refused = pytest.raises(ga.Overloaded, match="longer than the deadline allows")
            with refused if clients > 1 else contextlib.nullcontext():
                async with door(time.monotonic() + 5.0, client="b"):
                    assert clients == 1, "let in before those of 100 clients"
    await _cancelled(tasks)


async def _held(admission: Admission, client: str, order: list[str] | None = None, **what: Any) -> None:
    async with admission.place(client=client, **what):
        if order is not None:
            order.append(client)


async def order_of(*asked: tuple[str, dict[str, Any]], weights: dict[str, float] | None = None) -> str:
    """The clients in the order in which they got the only place, which is held while they ask."""
    admission, order = Admission(1, queue_seconds=600, weights=weights), list[str]()
    async with admission.place(client="holder"):
        tasks = []
        for client, what in asked:
            tasks.append(asyncio.ensure_future(_held(admission, client, order, **what)))
            await settled()
    await asyncio.gather(*tasks)
    return "".join(order)


async def test_clients_take_turns_whoever_came_first() -> None:
    assert await order_of(*[("a", {})] * 4, *[("b", {})] * 3) == "abababa"


async def test_turns_are_by_cost_and_by_weight() -> None:
    assert await order_of(*[("a", {"cost": 3})] * 2, *[("b", {})] * 6) == "babbbabb"
    assert await order_of(*[("a", {})] * 4, *[("b", {})] * 4, weights={"a": 3.0}) == "abaaabbb"
    admission = Admission(2)
    async with admission.place(cost=0.1), admission.place(cost=1e15):
        pass
    assert admission.retry_after == 0.0, "work of far sizes leaves nothing behind"


async def test_of_one_client_the_short_goes_first_until_the_long_is_old() -> None:
    admission, order = Admission(1, queue_seconds=600), list[str]()

    async def ask(name: str, cost: float) -> None:
        async with admission.place(cost=cost, client="same"):
            order.append(name)

    async with admission.place(client="same"):
        tasks = [asyncio.ensure_future(ask("long", 5.0))]
        for _ in range(12):
            await settled()
            tasks.append(asyncio.ensure_future(ask("short", 2.0)))
        await settled()
        before = len(order)
    for _ in range(20):
        # One arrives for each that is let in: without ageing the long one would wait forever.
        tasks.append(asyncio.ensure_future(ask("short", 2.0)))
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert before == 0
    assert order[:2] == ["short", "short"]
    assert "long" in order[2:16], "it goes while short ones still come"


async def test_a_step_of_priority_goes_first_but_not_for_ever() -> None:
    assert await order_of(("a", {}), ("b", {"priority": 1}), ("c", {})) == "bac"
    admission, order = Admission(1, queue_seconds=600), list[str]()
    async with admission.place(client="holder"):
        tasks = [asyncio.ensure_future(_held(admission, "low", order))]
        await settled()
        for _ in range(3):
            tasks.append(asyncio.ensure_future(_held(admission, "high", order, priority=1)))
            await settled()
    for _ in range(10):
        tasks.append(asyncio.ensure_future(_held(admission, "high", order, priority=1)))
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert 1 <= order.index("low") <= 4


async def test_work_that_tells_how_it_goes_is_known_before_it_ends() -> None:
    clock = MockClock()
    admission = Admission(1, clock=clock)
    async with admission.place(cost=100.0) as place:
        clock.advance(1.0)
        place.did(1.0)
        with pytest.raises(ga.Overloaded, match="takes about 100 s"):
            async with admission.place(time.monotonic() + 150, cost=100.0):
                raise AssertionError("admitted")


async def test_each_that_is_refused_is_given_a_time_of_its_own_to_return() -> None:
    clock = MockClock()
    crowd = Crowd(Admission(1, waiting=0, clock=clock))
    await measured(crowd, clock, 4.0)
    found = []
    for number in range(20):
        if number % 2 == 0:  # the queue is empty in between, but refused clients will return
            holder = await crowd.join(number)
        with pytest.raises(ga.Overloaded) as caught:
            await crowd._hold(number + 1, None)
        found.append(caught.value.retry_after)
        if number % 2:
            clock.advance(4.0)
            await all_leave(crowd, [holder])
    assert found[:4] == pytest.approx([4, 8, 12, 16], abs=0.1)
    assert found[-1] == 60.0, "and none is sent away for longer"


async def test_what_was_admitted_is_refused_as_its_turn_comes_where_it_would_be_late() -> None:
    clock = MockClock()
    crowd = Crowd(Admission(2, queue_seconds=600, clock=clock))
    await measured(crowd, clock, 0.001)
    holders = [await crowd.join(0), await crowd.join(1)]
    late = await crowd.join(2, time.monotonic() + 30)
    assert crowd.admission.stats().waiting == 1
    clock.advance(1e4)
    crowd.let_go[0].set()
    await settled()
    crowd.let_go[1].set()
    with pytest.raises(ga.Overloaded, match="longer than foretold"):
        await late
    assert crowd.entered == [0, 1]
    await all_leave(crowd, holders)


async def test_work_that_would_miss_its_deadline_is_tried_again_where_nothing_runs() -> None:
    """Only a new measurement shows that the device is fast again."""
    clock = MockClock()
    crowd = Crowd(Admission(8, queue_seconds=600, clock=clock))
    holders = [await crowd.join(number) for number in range(8)]
    clock.advance(100.0)
    await all_leave(crowd, holders)
    with pytest.raises(ga.Overloaded):
        await crowd._hold(8, time.monotonic() + 30)
    clock.advance(0.5)
    task = await crowd.join(9, time.monotonic() + 30)
    await all_leave(crowd, [task])
    assert crowd.entered[-1] == 9


async def test_work_that_misses_its_deadline_even_alone_may_have_a_free_place_and_waits_for_none() -> None:
    clock = MockClock()
    crowd = Crowd(Admission(2, queue_seconds=600, clock=clock))
    await measured(crowd, clock, 100.0)
    tasks = [await crowd.join(number, time.monotonic() + 30) for number in range(2)]
    assert crowd.entered == [0, 1]
    with pytest.raises(ga.Overloaded):
        await crowd._hold(2, time.monotonic() + 30)
    await all_leave(crowd, tasks)
