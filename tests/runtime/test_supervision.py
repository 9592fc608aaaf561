"""Supervision: children that raise are replaced, by a policy, and every request to them is answered."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from support.service import AT_ONCE, Gate, answer, eventually, launches, raises, rows
from support.supervision import Sibling, Vital, Worker, alive, break_down, crash, hold, supervised
from support.watched_clock import WatchedClock

import gpu_actors as ga
from gpu_actors.runtime.waking import WakePipe

pytestmark = pytest.mark.usefixtures("all_threads_end", "fresh_workers")


# One restart


def test_a_handler_that_raises_answers_its_request_and_is_replaced() -> None:
    with supervised() as (ctx, worker, _):
        failure = crash(worker)
        assert isinstance(failure.__cause__, ZeroDivisionError)
        assert "worker failed while it handled the request: ZeroDivisionError('on purpose')" in str(failure)
        alive(worker)
        assert Worker.incarnations == 2
        assert ctx.health().state == "ready"


def test_a_refusal_is_an_answer_and_no_failure() -> None:
    with supervised() as (_, worker, _):
        for _ in range(7):
            with pytest.raises(ga.InvalidRequest):
                worker.submit(raises(ga.InvalidRequest("field", 1, "reason"))).result(30.0)
        assert (worker.restarts, Worker.incarnations) == (0, 1)


def test_a_launch_outlives_the_actor_that_made_it() -> None:
    with supervised() as (ctx, worker, sibling):
        gate = Gate()
        launched = worker.submit(launches(gate, "kept"))
        assert gate.entered.wait(30.0)
        crash(worker)
        alive(worker)
        assert (sibling.restarts, Sibling.incarnations, ctx.flash_attn.restarts) == (0, 1, 0), "one for one"
        gate.open()
        assert launched.result(30.0) == "kept"


def test_requests_that_the_dead_incarnation_held_are_answered() -> None:
    with supervised() as (_, worker, _):
        held = [worker.submit(hold) for _ in range(3)]
        crash(worker)
        for reply in held:
            with pytest.raises(ga.ActorFailed, match="failed while it held the request") as caught:
                reply.result(30.0)
            assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_actor_that_cannot_sleep_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    wait, failures = WakePipe.wait, [OSError("bad file descriptor")]
    with supervised() as (_, worker, _):

        def fail_once(pipe: WakePipe) -> None:
            if failures and pipe is worker._cell.mailbox._pipe:
                raise failures.pop()
            wait(pipe)

        monkeypatch.setattr(WakePipe, "wait", fail_once)
        assert worker.submit(answer("awake")).result(30.0) == "awake"
        alive(worker)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_no_exception_reaches_another_actor_or_context(error: BaseException) -> None:
    with supervised() as (_, worker, sibling), ga.open_context("mock") as other:
        crash(worker, error)
        alive(worker)
        assert (sibling.state, sibling.restarts) == ("running", 0)
        assert other.health().ready
        other.flash_attn.forward(rows(), rows(), rows()).result(30.0)


@pytest.mark.parametrize("error", [ZeroDivisionError(), SystemExit(3), KeyboardInterrupt()])
def test_an_exception_at_a_told_message_restarts_that_actor_alone(error: BaseException) -> None:
    class Told(ga.ServiceActor):
        label = "told"

        def on_message(self, message: Any) -> Any:
            raise message

    with ga.open_context("mock", ga.ContextOptions(actors=(Told,))) as ctx, ga.open_context("mock") as other:
        told = ctx.actor(Told)
        told._cell.ref.tell(error)
        eventually(lambda: told.restarts == 1 and told.state == "running")
        assert ctx.health().ready
        assert other.health().ready


# Policies


def test_all_for_one_replaces_every_sibling() -> None:
    with supervised(ga.RestartPolicy(strategy="all_for_one", backoff=0.0)) as (ctx, worker, sibling):
        crash(worker)
        for actor in (worker, sibling, ctx.flash_attn, ctx.cudnn, ctx.nvrtc):
            eventually(lambda actor=actor: actor.restarts == 1 and actor.state == "running")
        assert (Worker.incarnations, Sibling.incarnations) == (2, 2)
        ctx.flash_attn.forward(rows(), rows(), rows()).result(30.0)


def test_all_for_one_loses_none_of_the_siblings_requests() -> None:
    handled: list[int] = []

    def hold_once(actor: ga.ServiceActor, call: ga.Call[Any]) -> None:
        handled.append(1)
        if len(handled) == 1:
            hold(actor, call)
        else:
            call.resolve("by the next one", actor.outbox)

    policy = ga.RestartPolicy(strategy="all_for_one", backoff=0.0)
    with supervised(policy) as (_, worker, sibling):
        gate = Gate()
        launched = sibling.submit(launches(gate, "launched"))
        held = sibling.submit(hold_once)
        eventually(lambda: handled)
        claimed = sibling.submit(lambda actor, call: call.claim() and hold(actor, call))
        eventually(lambda: claimed._call.state == 1)
        crash(worker)
        assert held.result(30.0) == "by the next one"
        with pytest.raises(ga.ActorStopped, match="sibling stopped while it held the request"):
            claimed.result(30.0)
        gate.open()
        assert launched.result(30.0) == "launched"


def test_all_for_one_waits_for_a_sibling_at_its_last_call() -> None:
    busy, go_on = threading.Event(), threading.Event()

    def slow(actor: ga.ServiceActor, call: ga.Call[Any]) -> None:
        busy.set()
        assert go_on.wait(30.0)
        call.resolve("slowly", actor.outbox)

    with supervised(ga.RestartPolicy(strategy="all_for_one", backoff=0.0)) as (_, worker, sibling):
        reply = sibling.submit(slow)
        behind = sibling.submit(answer("behind"))
        assert busy.wait(30.0)
        crash(worker)
        eventually(lambda: worker.restarts == 1)
        assert (sibling.state, sibling.restarts) == ("restarting", 0)
        go_on.set()
        assert reply.result(30.0) == "slowly"
        assert behind.result(30.0) == "behind"
        eventually(lambda: sibling.restarts == 1 and sibling.state == "running")


def test_a_sibling_that_fails_when_it_is_asked_to_stop_counts_as_stopped() -> None:
    gate = Gate()

    def fail_late(actor: ga.ServiceActor, call: ga.Call[Any]) -> None:
        gate()
        raise ZeroDivisionError

    with supervised(ga.RestartPolicy(strategy="all_for_one", max_restarts=1, backoff=0.0)) as (ctx, worker, sibling):
        late = sibling.submit(fail_late)
        assert gate.entered.wait(30.0)
        crash(worker)
        eventually(lambda: worker.restarts == 1)
        gate.open()
        with pytest.raises(ga.ActorFailed):
            late.result(30.0)
        alive(sibling)
        assert ctx.health().ready, "one failure, not two"
        assert (worker.restarts, Sibling.incarnations) == (1, 2)


def test_backoff_grows_from_restart_to_restart_and_starts_again_after_the_window() -> None:
    clock = WatchedClock()
    policy = ga.RestartPolicy(max_restarts=3, window=100.0, backoff=1.0, backoff_factor=3.0, backoff_max=5.0)
    with supervised(policy, clock=clock) as (ctx, worker, _):
        for times, delay in enumerate([1.0, 3.0, 5.0], start=1):
            crash_and_back_off(ctx, worker)
            waiting = worker.submit(answer("patience"))
            clock.advance_in_vain(delay - 0.25)
            assert (worker.state, worker.restarts) == ("restarting", times - 1)
            health = ctx.health()
            assert (health.state, health.ready) == ("degraded", True)
            assert "worker is restarting" in health.reason
            assert health.actors["worker"] == "restarting"
            clock.advance(0.25)
            assert waiting.result(30.0) == "patience"
            eventually(lambda: worker.state == "running")
        clock.advance(101.0)
        crash_and_back_off(ctx, worker)
        clock.advance(1.0)
        alive(worker, 4)


def crash_and_back_off(ctx: ga.GpuContext, actor: ga.ActorHandle) -> None:
    """Crash the actor and wait until its restart is scheduled."""
    timers = ctx._children.timers
    before = len(timers._heap)
    crash(actor)
    eventually(lambda: actor.state == "restarting" and len(timers._heap) > before)


# Escalation


@pytest.mark.usefixtures("patient_closing")
def test_one_failure_too_many_fails_the_context_and_says_why() -> None:
    events: list[ga.TraceEvent] = []
    policy = ga.RestartPolicy(max_restarts=2, backoff=0.0)
    with supervised(policy, Vital, on_event=events.append, drain_timeout=60.0) as (ctx, worker, sibling):
        waiting = sibling.submit(hold)
        for times in (1, 2):
            crash(worker)
            alive(worker, times)
        crash(worker)
        with pytest.raises(ga.ActorStopped, match="the context has failed: worker failed more often") as caught:
            waiting.result(30.0)
        assert isinstance(caught.value.__cause__, ga.ActorFailed)
        eventually(lambda: ctx.health().state == "failed")
        health = ctx.health()
        assert not health.ready
        assert "worker failed more often than its restart policy allows, last with ZeroDivisionError" in health.reason
        for actor in (worker, sibling):
            with pytest.raises(ga.ActorStopped, match="the context has failed"):
                actor.submit(answer(None)).result(30.0)
        with pytest.raises(ga.ActorStopped, match="the context has failed"):
            ctx.flash_attn.forward(rows(), rows(), rows()).result(30.0)
        start = time.monotonic()
    assert time.monotonic() - start < AT_ONCE, "there is nothing to drain"
    assert [event.fields["actor"] for event in events if event.name == "actor.failed"] == ["worker"]
    assert [event.fields["restarts"] for event in events if event.name == "actor.restarted"] == [1, 2]
    assert set(ctx.health().actors.values()) == {"failed"}
    assert ctx.health().state == "failed"


def test_an_actor_that_cannot_open_again_escalates_and_every_request_is_answered() -> None:
    def fail_from_the_second(number: int) -> None:
        if number > 1:
            raise OSError("no such library")

    Worker.openings = staticmethod(fail_from_the_second)
    policy = ga.RestartPolicy(max_restarts=3, backoff=0.0)
    with supervised(policy, Vital) as (ctx, worker, _):
        held = worker.submit(hold)
        crash(worker)
        queued = [worker.submit(answer(None)) for _ in range(5)]
        with pytest.raises(ga.ActorFailed):
            held.result(30.0)
        for reply in queued:
            with pytest.raises(ga.ActorStopped, match=r"OSError\('no such library'\)"):
                reply.result(30.0)
        eventually(lambda: ctx.health().state == "failed")
        assert Vital.incarnations == 4
        assert "no such library" in ctx.health().reason


def test_a_restart_that_was_due_does_not_bring_an_actor_back_into_a_failed_context() -> None:
    clock = WatchedClock()
    policy = ga.RestartPolicy(max_restarts=1, backoff=1.0)
    with supervised(policy, Vital, clock=clock) as (ctx, worker, _):
        crash(worker)
        eventually(lambda: worker.state == "restarting")
        break_down(ctx.flash_attn)
        eventually(lambda: (ctx.health().state, worker.state) == ("failed", "failed"))
        clock.advance_in_vain(5.0)
        assert worker.state == "failed"
        assert Vital.incarnations == 1
