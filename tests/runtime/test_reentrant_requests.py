"""A thread that holds a lock of the runtime makes, cancels and answers requests, at every point of its work.

The garbage collector does so when it ends a waiting task; a signal handler may do so too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from inside.actors import KvOrder
from support.interrupting import Case, each_point
from support.order import Cell

from gpu_actors.errors import ActorStopped
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.mailbox import Mailbox
from gpu_actors.runtime.timers import Timer, Timers
from gpu_actors.testing import MockClock

pytestmark = pytest.mark.timeout(60)  # a lock that cannot be taken twice would block forever


class Waiting:
    """A mailbox with three calls, and as many cancelled ones as it keeps before a sweep."""

    def __init__(self, cancelled: int = 65) -> None:
        self.mailbox = Mailbox("test", 1000, 8)
        self.calls: list[Call[Any]] = []
        self.taken: list[Call[Any]] = []
        for number in range(cancelled + 3):
            self.new(number % 3)
        for call in self.calls[:-3]:
            call.cancel()
        self.new_call: Call[Any] = Call("new", self.mailbox)
        self.one, self.other = self.calls[-3:-1]

    def new(self, priority: int = 0) -> Call[Any]:
        call: Call[Any] = Call("message", self.mailbox, priority)
        self.calls.append(call)
        self.mailbox.put(call)
        return call

    def put(self) -> None:
        self.mailbox.put(self.new_call)
        self.calls.append(self.new_call)

    def take(self) -> None:
        self.taken += self.pop()

    def pop(self) -> list[Call[Any]]:
        with self.mailbox.lock:
            return self.mailbox._pop(1000)

    def requeue(self) -> None:
        self.mailbox.requeue(self.pop())

    def park_and_requeue(self) -> None:
        calls = self.pop()
        for call in calls:
            self.mailbox.park(call)
        self.mailbox.requeue(calls)

    def cancel_all(self) -> None:
        for call in self.calls:
            call.cancel()

    def fail_all(self) -> None:
        self.mailbox.fail_all(lambda: ActorStopped("over"))

    def make_and_cancel_many(self) -> None:
        for _ in range(100):
            self.new().cancel()

    def look(self) -> None:
        self.mailbox.held(())
        self.mailbox.stats()

    def check(self) -> None:
        """Check that the mailbox gives out the unanswered calls in order, and that its counts agree."""
        left = self.pop()
        assert [(-call.priority, call.number) for call in left] == sorted(
            (-call.priority, call.number) for call in left
        )
        unanswered = {call for call in self.calls if not call.done}
        assert {*left, *(call for call in self.taken if not call.done)} == unanswered
        assert all(call.resolve(None) for call in unanswered)
        stats = self.mailbox.stats()
        assert stats.submitted == stats.completed + stats.failed + stats.cancelled
        assert (self.mailbox._parked, self.mailbox._unanswered) == (0, set())


ACTS: dict[str, Callable[[Waiting], Any]] = {
    "put": Waiting.put,
    "take": Waiting.take,
    "requeue": Waiting.requeue,
    "park and requeue": Waiting.park_and_requeue,
    "cancel": lambda waiting: waiting.one.cancel(),
    "answer": lambda waiting: waiting.one.resolve(1),
    "fail all": Waiting.fail_all,
    "claim": lambda waiting: waiting.one.claim(),
    "look": Waiting.look,
}
SWEEPING = ("cancel", "fail all")
INTERRUPTIONS: dict[str, Callable[[Waiting], Any]] = {
    "cancel the same": lambda waiting: waiting.one.cancel(),
    "cancel all": Waiting.cancel_all,
    "answer another": lambda waiting: waiting.other.resolve(2),
    "a new one": lambda waiting: waiting.new(9),
    "many new ones": Waiting.make_and_cancel_many,
    "look": Waiting.look,
}


@pytest.mark.parametrize("act", ACTS)
def test_a_mailbox_survives_use_from_within_its_own_methods(act: str) -> None:
    for interrupt in INTERRUPTIONS.values():

        def make(interrupt: Callable[[Waiting], Any] = interrupt) -> Case:
            waiting = Waiting(65 if act in SWEEPING else 4)
            return Case(lambda: ACTS[act](waiting), lambda: interrupt(waiting), waiting.check)

        assert each_point(("runtime/mailbox.py", "runtime/call.py"), make) > 0


@pytest.mark.parametrize("blocked_by", ["a kernel", "a launch"])
def test_a_blocking_call_may_end_while_another_is_put_behind_it(blocked_by: str) -> None:
    def make() -> Case:
        cell = Cell()
        order = KvOrder(cell)  # type: ignore[arg-type]
        first, held, later = cell.call(), cell.call(), cell.call()
        (order.block if blocked_by == "a kernel" else order.hold)(first)
        assert not order.admits(held)
        admitted = []

        def interrupt() -> None:
            first.cancel()
            order.look_again()

        def check() -> None:
            assert cell.flush_requested()
            order.release()
            came_back = cell.taken()
            assert came_back[0] is held
            assert admitted == [later not in came_back]
            assert all(order.admits(call) for call in came_back)
            assert cell.mailbox._parked == 0

        return Case(lambda: admitted.append(order.admits(later)), interrupt, check)

    assert each_point(("actors/kv_order.py",), make) > 5


def test_what_waits_may_be_cancelled_and_a_launch_end_while_calls_are_released() -> None:
    def make() -> Case:
        cell = Cell()
        order = KvOrder(cell)  # type: ignore[arg-type]
        first, held, later = cell.call(), cell.call(), cell.call()
        order.hold(first)
        assert not order.admits(held)
        assert not order.admits(later)
        order.look_again()

        def interrupt() -> None:
            held.cancel()
            order.look_again()

        def check() -> None:
            order.release()
            assert cell.taken() == [first, later]
            assert cell.mailbox._parked == 0

        return Case(order.release, interrupt, check)

    assert each_point(("actors/kv_order.py", "runtime/mailbox.py"), make) > 5


@pytest.mark.parametrize("interrupt", ["set", "cancel"])
def test_a_timer_may_be_set_and_cancelled_while_one_is_set(interrupt: str) -> None:
    def make() -> Case:
        clock = MockClock()
        timers = Timers(clock)
        ran: list[str] = []
        kept = timers.at(3.0, lambda: ran.append("kept"))
        gone: list[Timer] = [timers.at(2.0, lambda: ran.append("gone")) for _ in range(6)]
        timers._cancelled = 300  # enough for a sweep of cancelled timers
        for timer in gone[1:]:
            timer.cancel()

        def interrupted() -> None:
            gone[0].cancel()
            if interrupt == "set":
                timers.at(1.0, lambda: ran.append("interrupted"))

        def check() -> None:
            gone[0].cancel()
            assert kept.active
            due = sorted(entry[:2] for entry in timers._heap if entry[2].active)
            assert [when for when, _ in due] == ([1.0, 1.5, 3.0] if interrupt == "set" else [1.5, 3.0])
            assert timers._heap[0][0] == min(entry[0] for entry in timers._heap)
            timers.close()

        return Case(lambda: timers.at(1.5, lambda: None), interrupted, check)

    assert each_point(("gpu_actors/runtime/timers.py",), make) > 5
