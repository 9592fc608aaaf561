"""Fault plans and a context's reactions to injected faults: every request still gets its answer."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.service import AT_ONCE, Scripted, ask, eventually, no_threads_left, rows
from support.watched_clock import WatchedClock

import gpu_actors as ga
from gpu_actors.runtime.children import Children
from gpu_actors.runtime.completion import Completion
from gpu_actors.testing import Fault, FaultPlan, MockClock

pytestmark = pytest.mark.usefixtures("all_threads_end")


@contextmanager
def faulty(plan: FaultPlan, **options: Any) -> Iterator[ga.GpuContext]:
    options.setdefault("drain_timeout", 2.0)
    with ga.open_context("mock", ga.ContextOptions(fault_plan=plan, **options)) as ctx:
        yield ctx


def outcome(reply: ga.Reply[Any]) -> str:
    """The name of the error that answers a request, or "answered"."""
    try:
        reply.result(30.0)
    except ga.GpuActorsError as error:
        return type(error).__name__
    return "answered"


# The plan


def test_a_plan_is_frozen_and_each_step_gives_a_longer_one() -> None:
    empty = FaultPlan()
    one = empty.fail(launch=2)
    two = one.delay(0.5)
    assert (len(empty.faults), len(one.faults), len(two.faults)) == (0, 1, 2)
    assert two.faults == (Fault("fail", 2, None), Fault("delay", None, None, seconds=0.5))
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.faults = ()  # type: ignore[misc]
    assert FaultPlan().fail(launch=2) == one
    assert hash(FaultPlan().hang()) == hash(FaultPlan().hang())


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("launch", FaultPlan().fail),
        ("launch", FaultPlan().hang),
        ("launch", FaultPlan().lose_context),
        ("launch", lambda launch: FaultPlan().delay(0.1, launch)),
        ("seconds", FaultPlan().delay),
        ("error", lambda error: FaultPlan().fail(error=error)),
        ("key", lambda key: FaultPlan().fail(key=key)),
    ],
)
def test_what_no_plan_can_hold_is_refused(field: str, wrong: Any) -> None:
    values: dict[str, tuple[Any, ...]] = {
        "launch": (0, -1, 1.0, "1", True),
        "seconds": (-0.1, float("nan"), float("inf"), "1", None, True),
        "error": ("x", ValueError("x"), ValueError, ga.Unsupported, 3),
        "key": ("forward_simple",),
    }
    for value in values[field]:
        with pytest.raises(ga.InvalidRequest) as caught:
            wrong(value)
        assert caught.value.field == field


# Failing


def test_launches_of_the_whole_context_count_from_one_and_fail_with_the_error_that_the_plan_names() -> None:
    plan = FaultPlan().fail(2, ga.OutOfDeviceMemory).fail(3, ga.LaunchError("mine")).fail(4, ga.StaleBuffer("old"))
    params = ga.AttentionParams(1, 1, 1, 1, 1, 8)
    with faulty(plan.fail(5)) as ctx:
        assert outcome(ctx.cudnn.mha_forward(params, rows(), rows(), rows())) == "answered"
        with pytest.raises(ga.OutOfDeviceMemory, match="fault plan"):
            ask(ctx).result(30.0)
        with pytest.raises(ga.LaunchError, match=r"^mine$"):
            ask(ctx).result(30.0)
        assert outcome(ask(ctx, softcap=-1.0)) == "InvalidRequest", "no launch"
        assert [outcome(ask(ctx)) for _ in range(3)] == ["StaleBuffer", "LaunchError", "answered"]
        assert ctx.health().ready
        stats = ctx.stats()["flash_attn"]
    assert (stats.launched, stats.completed, stats.failed) == (5, 1, 5)


def test_a_key_limits_a_fault_to_its_launches_and_counts_those_alone() -> None:
    with ga.open_context("mock") as ctx:
        key = ctx.flash_attn.inspect_key(ga.FlashForward(q=rows(), k=rows(), v=rows(), causal=True))
    with faulty(FaultPlan().fail(launch=2, key=key)) as ctx:
        plain = [outcome(ask(ctx)) for _ in range(3)]
        causal = [outcome(ask(ctx, causal=True)) for _ in range(3)]
    assert plain == ["answered"] * 3
    assert causal == ["answered", "LaunchError", "answered"]


# Delaying


def test_a_delay_follows_the_contexts_clock() -> None:
    clock = WatchedClock()
    with faulty(FaultPlan().delay(3600.0, launch=1), clock=clock, hang_timeout=1e6) as ctx:
        reply = ask(ctx)
        eventually(lambda: ctx.stats()["flash_attn"].in_flight == 1)
        clock.advance_in_vain(3599.0, sleepers=2)
        assert not reply.done()
        clock.advance(1.0)
        assert outcome(reply) == "answered"
        assert outcome(ask(ctx)) == "answered"


def test_delays_add_up_and_take_real_time_without_a_mock_clock() -> None:
    with faulty(FaultPlan().delay(0.03).delay(0.02, launch=1)) as ctx:
        start = time.monotonic()
        assert outcome(ask(ctx)) == "answered"
        assert 0.05 <= time.monotonic() - start < AT_ONCE


def test_a_launch_that_is_delayed_and_fails_fails_late() -> None:
    clock = WatchedClock()
    with faulty(FaultPlan().delay(10.0).fail(launch=1), clock=clock) as ctx:
        reply = ask(ctx)
        eventually(lambda: ctx.stats()["flash_attn"].in_flight == 1)
        clock.advance_in_vain(9.0, sleepers=2)
        assert not reply.done()
        clock.advance(1.0)
        assert outcome(reply) == "LaunchError"


@pytest.mark.usefixtures("patient_closing")
def test_closing_ends_a_delay() -> None:
    with no_threads_left():
        with faulty(FaultPlan().delay(3600.0), drain_timeout=0.0) as ctx:
            reply = ask(ctx)
            eventually(lambda: ctx.stats()["flash_attn"].in_flight == 1)
            start = time.monotonic()
        assert outcome(reply) == "ActorStopped"
        assert time.monotonic() - start < AT_ONCE


# Losing the context


@pytest.mark.usefixtures("patient_closing")
def test_a_lost_context_answers_everything_and_says_so() -> None:
    """Requests in flight, queued, parked, held by another actor, and made later all get ContextLost."""
    plan = FaultPlan().hang(launch=1).lose_context(launch=2)
    params = ga.AttentionParams(1, 1, 1, 1, 1, 8)
    with faulty(plan, max_in_flight=1, actors=(Scripted,), drain_timeout=60.0) as ctx:
        in_flight = ask(ctx)
        eventually(lambda: ctx.stats()["flash_attn"].launched == 1)
        queued = [ask(ctx) for _ in range(4)]
        held = ctx.actor(Scripted).submit(lambda actor, call: None)
        eventually(lambda: ctx.stats()["scripted"].queued == 0)
        assert (ctx.generation, ctx.health().ready) == (1, True)

        losing = ctx.cudnn.mha_forward(params, rows(), rows(), rows())
        replies: list[ga.Reply[Any]] = [losing, in_flight, held, *queued]
        for reply in replies:
            with pytest.raises(ga.ContextLost, match="generation 1 of the context is lost") as caught:
                reply.result(30.0)
            assert caught.value.generation == 1
            assert isinstance(caught.value.__cause__, ga.ContextLost)
        assert len({id(reply._call.error) for reply in replies}) == len(replies), "an error each"

        health = ctx.health()
        assert (health.state, health.ready, health.generation, ctx.generation) == ("failed", False, 2, 2)
        assert "the device context is lost" in health.reason
        for later in (ask(ctx), ctx.cudnn.mha_forward(params, rows(), rows(), rows())):
            assert later.done(), "refused at once"
            with pytest.raises(ga.ContextLost) as caught:
                later.result()
            assert caught.value.generation == 1
        start = time.monotonic()
    assert time.monotonic() - start < AT_ONCE, "there is nothing to wait for"
    assert ctx.health().state == "failed"
    with pytest.raises(ga.ContextLost):
        ask(ctx).result(30.0)


def test_a_thread_that_meets_a_loss_being_reported_hears_of_the_same_generation() -> None:
    params = ga.AttentionParams(1, 1, 1, 1, 1, 8)
    met: list[ga.Reply[Any]] = []

    def listen(event: ga.TraceEvent) -> None:
        # The loss is known, but no request has been answered yet: another actor's launch meets the lost device first.
        if event.name == "context.lost":
            met.append(ctx.cudnn.mha_forward(params, rows(), rows(), rows()))
            assert met[0]._call.wait(30.0)

    with faulty(FaultPlan().lose_context(launch=1), on_event=listen) as ctx:
        replies = [ask(ctx)]
        eventually(replies[0].done)
        for reply in replies + met:
            with pytest.raises(ga.ContextLost, match="generation 1 of the context is lost") as caught:
                reply.result(30.0)
            assert caught.value.generation == 1
        assert len(met) == 1


def test_only_the_first_loss_counts() -> None:
    with faulty(FaultPlan()) as ctx:
        ctx._children.context_lost(ga.ContextLost("first"))
        ctx._children.context_lost(ga.ContextLost("second"))
        assert ctx.generation == 2
        assert "first" in ctx.health().reason


# Hanging


def test_launches_behind_a_hung_one_do_not_end_either() -> None:
    with faulty(FaultPlan().hang(launch=1), drain_timeout=0.0) as ctx:
        hung, behind = ask(ctx), ask(ctx)
        other = ctx.nvrtc.submit("no message of its own")
        assert outcome(other) == "InvalidRequest", "another actor's stream goes on"
        eventually(lambda: ctx.stats()["flash_attn"].in_flight == 2)
        assert not hung.done()
        assert not behind.done()
    assert [outcome(hung), outcome(behind)] == ["ActorStopped"] * 2


def test_a_launch_that_hangs_for_too_long_has_lost_the_context() -> None:
    clock = MockClock()
    with faulty(FaultPlan().hang(launch=1), clock=clock, hang_timeout=8.0, max_in_flight=1) as ctx:
        hung, queued = ask(ctx), ask(ctx)
        eventually(lambda: ctx.stats()["flash_attn"].in_flight == 1)
        assert ctx.health().state == "ready"
        clock.advance(4.5)
        health = ctx.health()
        assert (health.state, health.ready, health.oldest_launch) == ("stalled", False, 4.5)
        assert "has not finished for 4.5 s" in health.reason
        eventually(lambda: clock.advance(2.0) or (hung.done() and queued.done()))
        for reply in (hung, queued):
            with pytest.raises(ga.ContextLost, match="a launch has not finished within 8") as caught:
                reply.result(30.0)
            assert caught.value.generation == 1
        assert (ctx.generation, ctx.health().state) == (2, "failed")


def test_a_process_that_stood_still_for_longer_does_not_take_its_launches_for_hung(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launch ends meanwhile, and the hang check runs before the thread that settles it."""
    clock, looked = MockClock(), threading.Event()
    settle, oldest_launch = Completion._settle, Children.oldest_launch

    def settle_late(completion: Completion, *arguments: Any) -> None:
        assert looked.wait(30.0)
        settle(completion, *arguments)

    def look(children: Children) -> float | None:
        oldest = oldest_launch(children)
        if clock.now() > 50.0:
            looked.set()
        return oldest

    with faulty(FaultPlan().delay(1.0, launch=1), clock=clock, hang_timeout=8.0) as ctx:
        monkeypatch.setattr(Completion, "_settle", settle_late)
        monkeypatch.setattr(Children, "oldest_launch", look)
        reply = ask(ctx)
        eventually(lambda: ctx.stats()["flash_attn"].in_flight == 1)
        clock.advance(100.0)
        assert outcome(reply) == "answered"
        eventually(lambda: ctx.stats()["flash_attn"].in_flight == 0)
        clock.advance(100.0)
        assert outcome(ask(ctx)) == "answered"
        assert ctx.health().ready


def test_progress_ends_a_stall() -> None:
    clock = MockClock()
    with faulty(FaultPlan().delay(6.0, launch=1), clock=clock, hang_timeout=10.0) as ctx:
        reply = ask(ctx)
        eventually(lambda: ctx.stats()["flash_attn"].in_flight == 1)
        clock.advance(5.5)
        assert ctx.health().state == "stalled"
        clock.advance(0.5)
        assert outcome(reply) == "answered"
        eventually(lambda: ctx.health().state == "ready")


def test_an_endless_hang_timeout_is_one() -> None:
    with faulty(FaultPlan().hang(launch=1), hang_timeout=float("inf"), drain_timeout=0.0) as ctx:
        assert outcome(ask(ctx, timeout=0.02)) == "DeadlineExceeded", "deadlines still fire"
        assert ctx.health().ready
