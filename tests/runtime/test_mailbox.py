"""Mailboxes: bounds, priorities, deadlines, the limit on launches in flight, and the counts of requests."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.service import answer, eventually, launch_of, occupied, raises, scripted

import gpu_actors as ga
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.mailbox import Mailbox

pytestmark = pytest.mark.usefixtures("all_threads_end")


# Capacity


def test_a_full_mailbox_answers_overloaded_at_once_and_recovers() -> None:
    with scripted(mailbox_capacity=4, max_in_flight=1) as (ctx, actor):
        gate = occupied(actor)
        waiting = [actor.submit(answer(number)) for number in range(4)]
        refused = actor.submit(answer("too many"))
        assert refused.done(), "refused without waiting for anybody"
        with pytest.raises(ga.Overloaded, match="scripted has 4 requests waiting") as caught:
            refused.result()
        assert caught.value.retry_after > 0
        assert ctx.stats()["scripted"].queued == 4
        assert waiting[2].cancel()
        waiting[2] = actor.submit(answer("in its place"))
        gate.open()
        assert [reply.result(30.0) for reply in waiting] == [0, 1, "in its place", 3]
        assert actor.submit(answer("room again")).result(30.0) == "room again"


def test_cancelled_requests_do_not_pile_up() -> None:
    with scripted(max_in_flight=1) as (_, actor):
        gate = occupied(actor)
        for _ in range(1000):
            assert actor.submit(answer(None)).cancel()
        assert len(actor._cell.mailbox._order) < 200
        gate.open()


# Launches in flight


@pytest.mark.parametrize("limit", [1, 3])
def test_max_in_flight_is_never_exceeded(limit: int) -> None:
    lock = threading.Lock()
    now = most = 0
    may_end = threading.Semaphore(0)

    def work() -> None:
        assert may_end.acquire(timeout=30.0)

    def handle(actor: ga.ServiceActor, call: Call[Any]) -> None:
        nonlocal now, most
        if not call.claim():
            return
        with lock:
            now += 1
            most = max(most, now)
        actor.launch((call,), launch_of(work), finish)

    def finish(outputs: Any) -> tuple[None]:
        nonlocal now
        with lock:
            now -= 1
        return (None,)

    with scripted(max_in_flight=limit) as (ctx, actor):
        assert actor.max_in_flight == limit
        replies = [actor.submit(handle) for _ in range(4 * limit)]

        for ended in range(4 * limit):
            launched = min(ended + limit, 4 * limit)
            eventually(lambda launched=launched: ctx.stats()["scripted"].launched == launched)
            may_end.release()
        for reply in replies:
            reply.result(30.0)
        assert most == limit
        eventually(lambda: ctx.stats()["scripted"].in_flight == 0)


# Order


def order_of(priorities: list[int], **options: Any) -> list[int]:
    """The order in which requests submitted in this order, with these priorities, are handled."""
    handled: list[int] = []

    def handle(number: int) -> Callable[..., None]:
        def record(actor: ga.ServiceActor, call: Call[Any]) -> None:
            handled.append(number)
            call.resolve(None, actor.outbox)

        return record

    with scripted(max_in_flight=1, **options) as (_, actor):
        gate = occupied(actor)
        replies = [actor.submit(handle(number), priority=priority) for number, priority in enumerate(priorities)]
        gate.open()
        for reply in replies:
            reply.result(30.0)
    return handled


def test_higher_priorities_go_first_and_equal_ones_in_order_of_submission() -> None:
    assert order_of([0, 5, -1, 5, 0, 9]) == [5, 1, 3, 0, 4, 2]
    assert order_of([0] * 50) == list(range(50))


def test_a_request_that_has_waited_while_many_came_goes_before_newer_ones_of_higher_priority() -> None:
    """A step of priority is worth as many requests as the mailbox's capacity, so no request waits forever."""
    mailbox = Mailbox("aged", 8, 1)

    def put(priority: int) -> Call[Any]:
        call: Call[Any] = Call("message", mailbox, priority)
        mailbox.put(call)
        return call

    def take() -> Call[Any]:
        with mailbox.lock:
            return mailbox._pop(1)[0]

    low, lower = put(0), put(-1)
    taken = []
    for _ in range(40):
        put(1)
        put(1)
        taken += [take(), take()]
    assert 6 <= taken.index(low) <= 8
    assert 14 <= taken.index(lower) <= 17
    assert [call.number for call in taken if call.priority == 1] == sorted(
        call.number for call in taken if call.priority == 1
    )


def test_requests_that_are_given_back_keep_their_place() -> None:
    """One launch saturates the actor; requests taken with it go back in front of later ones."""
    handled: list[int] = []

    def launch_one(number: int) -> Callable[..., None]:
        def until_the_rest_are_given_back() -> None:
            eventually(lambda: actor.stats().queued == 19 - number)

        def handle(actor: ga.ServiceActor, call: Call[Any]) -> None:
            handled.append(number)
            if call.claim():
                actor.launch((call,), launch_of(until_the_rest_are_given_back), lambda outputs: (None,))

        return handle

    with scripted(max_in_flight=1) as (_, actor):
        gate = occupied(actor)
        replies = [actor.submit(launch_one(number)) for number in range(20)]
        gate.open()
        for reply in replies:
            reply.result(30.0)
    assert handled == list(range(20))


@pytest.mark.parametrize("priority", ["high", 1.0, None, True, math.nan])
def test_a_priority_that_is_no_int_is_refused(priority: Any) -> None:
    with scripted() as (_, actor), pytest.raises(ga.InvalidRequest, match="int") as caught:
        actor.submit(answer(None), priority=priority).result(30.0)
    assert caught.value.field == "priority"


# Counts


def test_stats_account_for_every_request() -> None:
    with scripted(max_in_flight=1, mailbox_capacity=3) as (ctx, actor):
        gate = occupied(actor)
        cancelled = actor.submit(answer(None))
        cancelled.cancel()
        waiting = [actor.submit(answer(None)), actor.submit(raises(ga.LaunchError("x"))), actor.submit(answer(None))]
        actor.submit(answer(None))  # overloaded
        actor.submit(answer(None), timeout=-1)
        actor.submit(answer(None), priority="x")  # type: ignore[arg-type]
        stats = ctx.stats()["scripted"]
        assert (stats.submitted, stats.cancelled, stats.failed, stats.queued, stats.in_flight) == (8, 1, 3, 3, 1)
        gate.open()
        for reply in waiting:
            eventually(reply.done)
        eventually(lambda: ctx.stats()["scripted"].completed == 3)
        stats = ctx.stats()["scripted"]
    assert (stats.completed, stats.failed, stats.cancelled, stats.queued, stats.in_flight) == (3, 4, 1, 0, 0)
    assert stats.submitted == stats.completed + stats.failed + stats.cancelled


class Batching(ga.ServiceActor):
    """Launches three requests together; ``start`` refuses or fails on demand."""

    label = "batching"

    def open(self) -> None:
        self.held: list[Call[Any]] = []

    def handle(self, call: Call[Any]) -> None:
        self.held.append(call)
        if len(self.held) == 3:
            calls = [held for held in self.held if held.claim()]
            self.held = []
            call.message(self, calls)


def batching(**options: Any) -> Any:
    return ga.open_context("mock", ga.ContextOptions(actors=(Batching,), drain_timeout=1.0, **options))


def test_requests_per_launch_counts_what_a_launch_answered() -> None:
    def start(actor: ga.ServiceActor, calls: list[Call[Any]]) -> None:
        actor.launch(calls, launch_of(lambda: None), lambda outputs: range(len(calls)))

    with batching() as ctx:
        replies = [ctx.actor(Batching).submit(start) for _ in range(6)]
        assert [reply.result(30.0) for reply in replies] == [0, 1, 2, 0, 1, 2]
        stats = ctx.stats()["batching"]
    assert (stats.launched, stats.requests_per_launch) == (2, 3.0)


def too_few_results(actor: ga.ServiceActor, calls: list[Call[Any]]) -> None:
    actor.launch(calls, launch_of(lambda: None), lambda outputs: (1,))


def refused_launch(actor: ga.ServiceActor, calls: list[Call[Any]]) -> None:
    refuse(actor, ga.LaunchError("refused"))
    actor.launch(calls, launch_of(lambda: None), lambda outputs: calls)


def broken_launch(actor: ga.ServiceActor, calls: list[Call[Any]]) -> None:
    refuse(actor, ZeroDivisionError("broken"))
    actor.launch(calls, launch_of(lambda: None), lambda outputs: calls)


def lost_launch(actor: ga.ServiceActor, calls: list[Call[Any]]) -> None:
    refuse(actor, ga.ContextLost("gone"))
    actor.launch(calls, launch_of(lambda: None), lambda outputs: calls)


def claimed_and_crashed(actor: ga.ServiceActor, calls: list[Call[Any]]) -> None:
    raise ZeroDivisionError("between claiming and launching")


def refuse(actor: ga.ServiceActor, error: Exception) -> None:
    stream = actor.cell.open_stream()

    def launch(_: Any) -> None:
        stream.launch = original
        raise error

    original, stream.launch = stream.launch, launch  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("start", "error"),
    [
        (too_few_results, ga.ActorFailed),
        (refused_launch, ga.LaunchError),
        (broken_launch, ga.ActorFailed),
        (lost_launch, ga.ContextLost),
        (claimed_and_crashed, ga.ActorFailed),
    ],
)
def test_a_batch_that_fails_answers_every_request_in_it(start: Callable[..., None], error: type) -> None:
    with batching() as ctx:
        replies = [ctx.actor(Batching).submit(start) for _ in range(3)]
        for reply in replies:
            with pytest.raises(error):
                reply.result(30.0)
        if error is ga.ContextLost:
            assert {reply._call.error.generation for reply in replies} == {1}
            return
        eventually(lambda: ctx.stats()["batching"].in_flight == 0)
        again = [ctx.actor(Batching).submit(answer_all) for _ in range(3)]
        assert [reply.result(30.0) for reply in again] == ["fine"] * 3


def answer_all(actor: ga.ServiceActor, calls: list[Call[Any]]) -> None:
    actor.launch(calls, launch_of(lambda: None), lambda outputs: ["fine"] * len(calls))


# Many senders


def test_a_closed_mailbox_refuses_with_a_fresh_error_each_time() -> None:
    mailbox = Mailbox("closed", 4, 1)
    mailbox.close(lambda: ga.ActorStopped("over"))
    calls = [Call(None, mailbox) for _ in range(2)]
    for call in calls:
        mailbox.put(call)
    assert all(isinstance(call.error, ga.ActorStopped) for call in calls)
    assert calls[0].error is not calls[1].error


def test_an_answered_call_is_not_queued() -> None:
    mailbox = Mailbox("late", 4, 1)
    call: Call[Any] = Call(None, mailbox)
    call.fail(ga.DeadlineExceeded("before it got there"))
    mailbox.put(call)
    stats = mailbox.stats()
    assert (stats.submitted, stats.failed, stats.queued) == (1, 1, 0)


def test_an_actor_without_a_handle_of_its_own_refuses_calls_and_lives_on() -> None:
    class Deaf(ga.ServiceActor):
        pass

    with ga.open_context("mock", ga.ContextOptions(actors=(Deaf,))) as ctx:
        for message in (1, "two"):
            with pytest.raises(ga.InvalidRequest, match=r"Deaf takes no requests: it has no handle\(\) of its own"):
                ctx.actor(Deaf).submit(message).result(30.0)
        assert ctx.health().ready
