"""How actors begin and end: opening, closing, death watch, and stopping unasked."""

from __future__ import annotations

import threading
import time
from typing import Any

import pykka
import pytest
from inside.devices import MockDevice
from support.service import AT_ONCE, Gate, answer, eventually, no_threads_left, rows
from support.supervision import Sibling, Vital, Worker, alive, crash, hold, supervised

import gpu_actors as ga
from gpu_actors.testing import MockClock

pytestmark = pytest.mark.usefixtures("all_threads_end", "fresh_workers")


# Opening


@pytest.mark.parametrize("error", [OSError("no such library"), SystemExit(1), KeyboardInterrupt()])
def test_an_actor_that_cannot_open_at_first_keeps_the_context_from_opening(error: BaseException) -> None:
    def fail(number: int) -> None:
        raise error

    Sibling.openings = staticmethod(fail)
    with no_threads_left():
        with pytest.raises(ga.ActorFailed, match="the context could not open") as caught, supervised():
            pass
        assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "broken",
    [
        {"make_shared": classmethod(lambda cls, cell: 1 / 0)},
        {"__init__": lambda self, cell: 1 / 0},
        {"label": "flash_attn"},
    ],
    ids=["make_shared", "init", "label"],
)
def test_an_actor_that_cannot_be_made_keeps_the_context_from_opening(broken: dict[str, Any]) -> None:
    kind = type("Broken", (ga.ServiceActor,), {"label": "broken", **broken})
    with (
        no_threads_left(),
        pytest.raises(ga.GpuActorsError),
        ga.open_context("mock", ga.ContextOptions(actors=(kind,))),
    ):
        pass


def test_what_is_shared_is_found_again_after_a_restart_and_closed_in_the_end() -> None:
    class Shared:
        closed = False

        def close(self) -> None:
            self.closed = True

    class Keeper(Worker):
        label = "keeper"

        @classmethod
        def make_shared(cls, cell: Any) -> Shared:
            return Shared()

    def shared(actor: ga.ServiceActor, call: ga.Call[Any]) -> None:
        call.resolve(actor.cell.shared, actor.outbox)

    options = ga.ContextOptions(actors=(Keeper,), restart=ga.RestartPolicy(backoff=0.0))
    with ga.open_context("mock", options) as ctx:
        keeper = ctx.actor(Keeper)
        first = keeper.submit(shared).result(30.0)
        crash(keeper)
        assert keeper.submit(shared).result(30.0) is first
        assert not first.closed
    assert first.closed


@pytest.mark.usefixtures("patient_closing")
@pytest.mark.parametrize("error", [ZeroDivisionError(), SystemExit(1), KeyboardInterrupt()])
@pytest.mark.parametrize("broken", ["shared", "device"])
def test_what_raises_when_it_is_closed_keeps_nothing_else_open(
    error: BaseException, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Shared:
        def close(self) -> None:
            if broken == "shared":
                raise error

    class Keeper(Worker):
        label = "keeper"

        @classmethod
        def make_shared(cls, cell: Any) -> Shared:
            return Shared()

    if broken == "device":
        close = MockDevice.close

        def close_and_raise(self: MockDevice) -> None:
            close(self)
            raise error

        monkeypatch.setattr(MockDevice, "close", close_and_raise)
    with no_threads_left():
        other = ga.open_context("mock").__enter__()
        with ga.open_context("mock", ga.ContextOptions(actors=(Keeper,))) as ctx:
            ctx.flash_attn.forward(rows(), rows(), rows()).result(30.0)
            start = time.monotonic()
        assert time.monotonic() - start < AT_ONCE
        assert ctx.health().state == "stopped"
        other.flash_attn.forward(rows(), rows(), rows()).result(30.0)
        other.close()

        def fail(number: int) -> None:
            raise OSError("cannot open either")

        Keeper.openings = staticmethod(fail)
        with pytest.raises(ga.ActorFailed, match="cannot open either"):
            ga.open_context("mock", ga.ContextOptions(actors=(Keeper,))).__enter__()
    assert f"closing {'what keeper shared' if broken == 'shared' else 'the device'} raised" in caplog.text


# Death watch


def test_a_watcher_hears_once_when_an_actor_stops() -> None:
    heard: list[ga.Terminated] = []
    with supervised() as (_, worker, _):
        worker.watch(heard.append)
        crash(worker)
        alive(worker)
        assert not heard, "a restart is no death"
    assert heard == [ga.Terminated("worker", None)]
    worker.watch(heard.append)
    assert len(heard) == 2, "of the dead at once"


def test_a_watcher_hears_why_an_actor_failed_for_good() -> None:
    heard: list[ga.Terminated] = []
    with supervised(ga.RestartPolicy(max_restarts=0), Vital) as (_, worker, sibling):
        for actor in (worker, sibling):
            actor.watch(heard.append)
        crash(worker)
        eventually(lambda: len(heard) == 2)
    assert {terminated.label for terminated in heard} == {"worker", "sibling"}
    for terminated in heard:
        assert isinstance(terminated.error, ga.ActorFailed)
        assert isinstance(terminated.error.__cause__, ZeroDivisionError)


@pytest.mark.usefixtures("patient_closing")
@pytest.mark.parametrize("error", [ZeroDivisionError(), SystemExit(3)])
def test_a_watcher_that_raises_stops_no_actor_and_no_other_watcher(error: BaseException) -> None:
    heard: list[ga.Terminated] = []

    def fail(terminated: ga.Terminated) -> None:
        raise error

    with ga.open_context("mock") as other:
        with supervised(drain_timeout=60.0) as (ctx, worker, _):
            worker.watch(fail)
            worker.watch(heard.append)
            start = time.monotonic()
        assert time.monotonic() - start < AT_ONCE
        assert heard == [ga.Terminated("worker", None)]
        assert ctx.health().state == "stopped"
        assert other.health().ready


@pytest.mark.usefixtures("patient_closing")
def test_an_actor_that_fails_while_the_context_closes_does_not_hold_it_up() -> None:
    gate = Gate()

    def fail_late(actor: ga.ServiceActor, call: ga.Call[Any]) -> None:
        gate()
        raise ZeroDivisionError

    with supervised(drain_timeout=0.0) as (_, worker, _):
        reply = worker.submit(fail_late)
        assert gate.entered.wait(30.0)
        threading.Timer(0.05, gate.open).start()
        start = time.monotonic()
    assert time.monotonic() - start < AT_ONCE
    with pytest.raises(ga.ActorStopped):
        reply.result(0.0)


# Stopping without being asked by the context


def test_an_actor_that_stops_itself_answers_its_requests_and_is_not_replaced() -> None:
    def stop(actor: ga.ServiceActor, call: ga.Call[Any]) -> None:
        call.resolve("bye", actor.outbox)
        actor.stop()

    heard: list[ga.Terminated] = []
    with supervised() as (ctx, worker, sibling):
        worker.watch(heard.append)
        held = worker.submit(hold)
        assert worker.submit(stop).result(30.0) == "bye"
        for reply in (held, worker.submit(answer(None))):
            with pytest.raises(ga.ActorStopped, match="worker has stopped"):
                reply.result(30.0)
        assert heard == [ga.Terminated("worker", None)]
        health = ctx.health()
        assert (health.state, health.ready, health.reason) == ("degraded", True, "worker is stopped")
        assert Worker.incarnations == 1
        assert sibling.submit(answer("still here")).result(30.0) == "still here"


def test_health_is_not_ready_once_a_built_in_actor_has_stopped() -> None:
    with supervised() as (ctx, _, _):
        ctx.flash_attn._cell.ref.stop()
        eventually(lambda: ctx.flash_attn.state == "stopped")
        health = ctx.health()
        assert (health.state, health.ready, health.reason) == ("failed", False, "flash_attn has stopped")
        with pytest.raises(ga.ActorStopped, match="flash_attn has stopped"):
            ctx.flash_attn.forward(rows(), rows(), rows()).result(30.0)


class Lazy:
    """An array whose library does not return when it is asked for the data."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.__dlpack_device__ = rows().__dlpack_device__

    def __dlpack__(self, **options: Any) -> Any:
        self.gate()
        return rows().__dlpack__(**options)


def test_health_is_not_ready_while_a_built_in_actor_cannot_get_on() -> None:
    clock, lazy = MockClock(), Lazy()
    with supervised(clock=clock, hang_timeout=10.0) as (ctx, worker, _):
        held = ctx.flash_attn.forward(lazy, rows(), rows())
        assert lazy.gate.entered.wait(30.0)
        clock.advance(4.0)
        assert ctx.health().state == "ready"
        clock.advance(2.0)
        health = ctx.health()
        reason = "flash_attn cannot get on with its requests"
        assert (health.state, health.ready, health.reason) == ("stalled", False, reason)
        lazy.gate.open()
        assert held.result(30.0).out.shape == rows().shape
        eventually(lambda: ctx.health().state == "ready")

        gate = Gate()
        worker.submit(lambda actor, call: gate() or call.resolve(None))
        assert gate.entered.wait(30.0)
        clock.advance(6.0)
        health = ctx.health()
        reason = "worker cannot get on with its requests"
        assert (health.state, health.ready, health.reason) == ("degraded", True, reason)
        gate.open()


@pytest.mark.usefixtures("patient_closing")
def test_stopping_every_pykka_actor_answers_every_request() -> None:
    with supervised(drain_timeout=60.0) as (ctx, worker, _):
        held = worker.submit(hold)
        eventually(lambda: ctx.stats()["worker"].queued == 0)
        pykka.ActorRegistry.stop_all()
        with pytest.raises(ga.ActorStopped):
            held.result(30.0)
        eventually(lambda: ctx.health().state == "failed")
        assert not ctx.health().ready
        with pytest.raises(ga.ActorStopped):
            ctx.flash_attn.forward(rows(), rows(), rows()).result(30.0)
        start = time.monotonic()
    assert time.monotonic() - start < AT_ONCE


def test_stopping_the_context_actor_alone_answers_every_request() -> None:
    with supervised() as (ctx, worker, _):
        held = worker.submit(hold)
        ctx._root._ref.stop()
        with pytest.raises(ga.ActorStopped, match="stopped from outside"):
            held.result(30.0)
        assert ctx.health().state == "failed"
        with pytest.raises(ga.ActorStopped, match="stopped from outside"):
            worker.submit(answer(None)).result(30.0)
