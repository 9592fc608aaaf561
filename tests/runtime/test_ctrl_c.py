"""A KeyboardInterrupt at any point of the main thread's work for other threads loses no answer and no wake-up."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from inside.actors import KvOrder
from inside.package import SystemClock
from support.interrupting import Case, each_point
from support.order import Cell
from support.service import eventually

from gpu_actors.errors import ActorStopped
from gpu_actors.runtime.call import Call, Gate
from gpu_actors.runtime.mailbox import Mailbox
from gpu_actors.runtime.timers import Timers
from gpu_actors.runtime.waking import Outbox, Waiter, _wake

pytestmark = pytest.mark.timeout(120)

FILES = ("runtime/call.py", "runtime/mailbox.py", "runtime/waking.py")


def interrupt() -> None:
    raise KeyboardInterrupt


def interrupted(act: Callable[[], Any], check: Callable[[], Any]) -> Case:
    def go() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            act()

    return Case(go, interrupt, check)


class Loop:
    """An event loop whose callbacks run when the test says so."""

    def __init__(self) -> None:
        self.asked: deque[Callable[[], Any]] = deque()

    def call_soon_threadsafe(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.asked.append(lambda: function(*arguments))

    call_soon = call_soon_threadsafe

    def run(self) -> None:
        while self.asked:
            self.asked.popleft()()


class Sleeper:
    """Stands in for a mailbox's wake pipe."""

    def __init__(self) -> None:
        self.woken = 0

    def wake(self) -> None:
        self.woken += 1


class Awaited:
    """Two calls; tasks on two loops, threads and callbacks wait for the first."""

    def __init__(self) -> None:
        self.mailbox = Mailbox("test", 1000, 8)
        self.mailbox._pipe = self.pipe = Sleeper()  # type: ignore[assignment]
        self.calls: list[Call[Any]] = [Call(number, self.mailbox) for number in range(3)]
        for call in self.calls:
            self.mailbox.put(call)
        self.mailbox._asleep = True
        self.loops = Loop(), Loop()
        self.stepped: list[Waiter] = []
        self.called: set[str] = set()
        self.gates: list[Gate] = []
        for call in self.calls[:2]:
            for loop in (*self.loops, self.loops[0]):
                waiter = Waiter(loop)  # type: ignore[arg-type]
                waiter.add_done_callback(self.stepped.append, context=contextvars.copy_context())
                call.add_waiter(waiter)
            gates = [Gate(), Gate()]
            for gate in gates:
                call.when_done(gate)
            self.gates += gates
            for name in ("first", "second"):
                call.when_done(lambda call, name=name: self.called.add(f"{name} of {call.message}"))
        self.mailbox.when_idle(lambda: self.called.add("idle"))
        self.mailbox.when_idle(lambda: self.called.add("idle too"))

    def told(self, *calls: Call[Any]) -> None:
        """Check that each waiter of these calls has been told."""
        for loop in self.loops:
            loop.run()
        assert not self.mailbox.lock._is_owned()  # type: ignore[attr-defined]
        numbers = [call.message for call in calls]
        assert len(self.stepped) == len(set(self.stepped)) == 3 * len(calls)
        assert sum(not gate._lock.locked() for gate in self.gates) == 2 * len(calls)
        assert {f"{name} of {number}" for name in ("first", "second") for number in numbers} <= self.called
        stats = self.mailbox.stats()
        assert stats.completed + stats.failed + stats.cancelled == sum(call.done for call in self.calls)
        assert all(not call.done for call in self.mailbox._unanswered)


@pytest.mark.parametrize("how", ["with an outbox", "alone", "cancelled"])
def test_an_interrupted_answer_reaches_every_waiter(how: str) -> None:
    def make() -> Case:
        awaited = Awaited()
        call = awaited.calls[0]
        outbox = Outbox()

        def settle() -> None:
            if how == "cancelled":
                call.cancel()
            elif how == "alone":
                call.resolve("value")
            else:
                call.resolve("value", outbox)

        def check() -> None:
            if not call.done:  # interrupted before anything had happened
                settle()
            outbox.flush()
            awaited.told(call)

        return interrupted(settle, check)

    assert each_point(FILES, make) > 20


def test_ctrl_c_in_a_callback_behind_one_that_raises_reaches_the_program() -> None:
    call = Call("message", Mailbox("actor", 4, 4))
    called: list[str] = []
    call.when_done(lambda _: 1 // 0)  # type: ignore[arg-type, return-value]
    call.when_done(lambda _: interrupt())
    call.when_done(lambda _: called.append("third"))
    with pytest.raises(KeyboardInterrupt):
        call.resolve("value")
    assert called == ["third"]


def test_an_interrupted_last_answer_ends_a_drain() -> None:
    def make() -> Case:
        awaited = Awaited()
        for call in awaited.calls[1:]:
            call.resolve(None)
        call = awaited.calls[0]

        def check() -> None:
            call.resolve(None)
            awaited.told(*awaited.calls[:2])
            assert {"idle", "idle too"} <= awaited.called

        return interrupted(lambda: call.resolve(None), check)

    assert each_point(FILES, make) > 20


def test_an_interrupted_closing_answers_every_call() -> None:
    def make() -> Case:
        awaited = Awaited()

        def fail_all() -> None:
            awaited.mailbox.fail_all(lambda: ActorStopped("over"))

        def check() -> None:
            if not any(call.done for call in awaited.calls):
                fail_all()
            assert all(call.done for call in awaited.calls)
            awaited.told(*awaited.calls[:2])

        return interrupted(fail_all, check)

    assert each_point(FILES, make) > 50


@pytest.mark.parametrize("how", ["put", "requeue", "nudge"])
def test_an_actor_that_missed_a_wake_up_is_woken_by_the_next_call(how: str) -> None:
    def make() -> Case:
        awaited = Awaited()
        mailbox, pipe = awaited.mailbox, awaited.pipe
        new: Call[Any] = Call("new", mailbox)
        taken = mailbox._pop(1)
        acts = {
            "put": lambda: mailbox.put(new),
            "requeue": lambda: mailbox.requeue(taken),
            "nudge": mailbox.nudge,
        }

        def check() -> None:
            mailbox.put(Call("another", mailbox))
            assert pipe.woken
            waiting = set(mailbox._pop(1000))
            assert all(call in waiting or call in taken for call in mailbox._unanswered)

        return interrupted(acts[how], check)

    assert each_point(FILES, make) > 3


def test_an_actor_is_woken_by_the_next_call_after_a_sender_was_interrupted_at_its_work() -> None:
    def make() -> Case:
        awaited = Awaited()
        mailbox, pipe = awaited.mailbox, awaited.pipe
        for call in mailbox._pop(1000):
            call.cancel()
        meanwhile: Call[Any] = Call("meanwhile", mailbox)

        def work(call: Call[Any]) -> None:
            mailbox.put(meanwhile)
            call.resolve("done")

        mailbox._work = work
        new: Call[Any] = Call("new", mailbox)

        def check() -> None:
            another: Call[Any] = Call("another", mailbox)
            mailbox.put(another)
            assert pipe.woken
            assert not mailbox._working_directly
            assert another in mailbox._pop(1000)
            assert new.done or new not in mailbox._unanswered

        return interrupted(lambda: mailbox.put(new, direct=True), check)

    assert each_point(FILES, make) > 20


def test_an_interrupted_sweep_keeps_the_order_of_calls() -> None:
    def make() -> Case:
        mailbox = Mailbox("test", 1000, 8)
        calls: list[Call[Any]] = [Call(number, mailbox) for number in range(70)]
        for call in calls:
            mailbox.put(call)
        for call in calls[:-3]:
            call.cancel()

        def check() -> None:
            calls[-3].cancel()
            assert mailbox._pop(1000) == calls[-2:]

        return interrupted(calls[-3].cancel, check)

    assert each_point(("runtime/mailbox.py",), make) > 3


def test_a_loop_that_runs_again_after_an_interruption_wakes_every_task() -> None:
    def make() -> Case:
        loop = Loop()
        stepped: list[Waiter] = []
        waiters = [Waiter(loop) for _ in range(3)]  # type: ignore[arg-type]
        for waiter in waiters:
            waiter.add_done_callback(stepped.append, context=contextvars.copy_context())
        loop.call_soon(_wake, deque(waiters))

        def check() -> None:
            if not stepped and not loop.asked:
                _wake(deque(waiters))  # interrupted before the callback began, which would end a real loop too
            loop.run()
            assert stepped == waiters

        return interrupted(loop.run, check)

    assert each_point(FILES, make) > 5


def test_calls_behind_a_cancelled_call_are_handled_after_an_interruption() -> None:
    def make() -> Case:
        cell = Cell()
        order = KvOrder(cell)  # type: ignore[arg-type]
        blocked, *later = (cell.call() for _ in range(4))
        order.block(blocked)
        assert not any(order.admits(call) for call in later)

        def check() -> None:
            blocked.cancel()
            assert cell.flush_requested()
            order.release()
            assert cell.taken() == later
            assert all(order.admits(call) for call in later)
            assert cell.mailbox._parked == 0

        return interrupted(blocked.cancel, check)

    assert each_point((*FILES, "actors/kv_order.py"), make) > 15


class Sleeping(SystemClock):
    """A clock that tells when the timers' thread sleeps without a limit."""

    def __init__(self) -> None:
        self.asleep = threading.Event()

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        if until is None:
            self.asleep.set()  # it holds the condition, so nothing is set before it sleeps
        super().wait(condition, until)


def test_a_timer_set_after_an_interrupted_one_still_fires() -> None:
    def make() -> Case:
        clock = Sleeping()
        timers = Timers(clock)
        ran = threading.Event()
        timers.at(0.0, clock.asleep.clear)
        eventually(clock.asleep.is_set)
        now = clock.now()

        def check() -> None:
            timers.at(now + 0.001, ran.set)
            assert ran.wait(20.0)
            timers.close()

        return interrupted(lambda: timers.at(now, lambda: None), check)

    assert each_point(("gpu_actors/runtime/timers.py",), make) > 3
