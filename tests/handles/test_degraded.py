"""A context whose launches or actors fail repeatedly reports it, and detects by itself when they succeed again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.service import NO_COMPUTE, answer, ask, eventually, rows
from support.supervision import alive, break_down, crash, supervised

import gpu_actors as ga
from gpu_actors.testing import FaultPlan, MockClock

pytestmark = pytest.mark.usefixtures("all_threads_end", "fresh_workers")


def failing(launches: range, error: Any = ga.LaunchError) -> FaultPlan:
    """A fault plan in which these launches end with the error."""
    plan = FaultPlan()
    for launch in launches:
        plan = plan.fail(launch=launch, error=error)
    return plan


def opened(plan: FaultPlan, **options: Any) -> Any:
    options.setdefault("clock", MockClock())
    return ga.open_context("mock", ga.ContextOptions(fault_plan=plan, **options))


def fail(ctx: ga.GpuContext, times: int, error: type[ga.GpuActorsError] = ga.LaunchError) -> None:
    for _ in range(times):
        with pytest.raises(error):
            ask(ctx).result(30.0)


def probes(ctx: ga.GpuContext) -> int:
    """Launches so far, among them the probes."""
    return ctx.stats()["flash_attn"].launched


def waits_to_probe(ctx: ga.GpuContext) -> bool:
    """Whether a probe is scheduled: only the hang check and the probe have timers here."""
    return len(ctx._children.timers._heap) == 2


def on_trial(ctx: ga.GpuContext) -> None:
    """Wait until a probe has succeeded."""
    eventually(lambda: ctx.health().ready and ctx.health().failures["flash_attn"] == 4)


@pytest.mark.parametrize("error", [ga.LaunchError, ga.OutOfDeviceMemory, ga.CompileError])
def test_launches_that_fail_in_a_row_end_readiness_and_a_probe_brings_it_back(error: type[ga.GpuActorsError]) -> None:
    clock = MockClock()
    with opened(failing(range(2, 10), error), clock=clock) as ctx:
        ask(ctx).result(30.0)
        fail(ctx, 4, error)
        assert (ctx.health().state, ctx.health().failures["flash_attn"]) == ("ready", 4)
        fail(ctx, 1, error)
        health = ctx.health()
        assert (health.state, health.ready, health.failures["flash_attn"]) == ("degraded", False, 5)
        assert f"flash_attn has failed 5 launches in a row, last with {error.__name__}: a fault plan" in health.reason
        for launched in (7, 8, 9):
            eventually(lambda: waits_to_probe(ctx))
            assert probes(ctx) == launched - 1, "a probe waits for its time"
            clock.advance(1.0)
            eventually(lambda launched=launched: probes(ctx) == launched)
            assert not ctx.health().ready
        eventually(lambda: waits_to_probe(ctx))
        clock.advance(1.0)
        eventually(lambda: ctx.health().ready)
        assert (ctx.health().state, ctx.health().reason, probes(ctx)) == ("ready", "", 10)


def test_after_a_probe_one_more_failure_ends_readiness_and_a_success_ends_the_trial() -> None:
    clock = MockClock()
    with opened(failing(range(1, 6)).fail(launch=7).fail(launch=10), clock=clock) as ctx:
        fail(ctx, 5)
        eventually(lambda: waits_to_probe(ctx))
        clock.advance(1.0)
        on_trial(ctx)
        fail(ctx, 1)
        assert not ctx.health().ready
        eventually(lambda: waits_to_probe(ctx))
        clock.advance(1.0)
        on_trial(ctx)
        ask(ctx).result(30.0)
        assert ctx.health().failures["flash_attn"] == 0
        fail(ctx, 1)
        assert ctx.health().ready


def test_a_request_that_succeeds_brings_readiness_back_too() -> None:
    with opened(failing(range(1, 6))) as ctx:
        fail(ctx, 5)
        assert not ctx.health().ready
        ask(ctx).result(30.0)
        assert (ctx.health().state, ctx.health().failures["flash_attn"]) == ("ready", 0)


def test_a_requests_own_fault_does_not_count() -> None:
    clock = MockClock()
    with opened(FaultPlan().hang(launch=1), clock=clock, degraded_after=1, hang_timeout=1e6, drain_timeout=0.1) as ctx:
        with pytest.raises(ga.InvalidRequest):
            ctx.flash_attn.forward(1, 2, 3).result(30.0)
        with pytest.raises(ga.Unsupported):
            ctx.flash_attn.forward(*[rows(dtype=np.int32)] * 3).result(30.0)
        late = ask(ctx, timeout=5.0)
        eventually(lambda: ctx.stats()["flash_attn"].in_flight == 1)
        clock.advance(6.0)
        with pytest.raises(ga.DeadlineExceeded):
            late.result(30.0)
        assert (ctx.health().state, ctx.health().failures["flash_attn"]) == ("ready", 0)


def test_a_mock_device_that_is_told_not_to_compute_is_ready_and_recovers() -> None:
    clock = MockClock()
    with opened(failing(range(10, 15)), mock=NO_COMPUTE, clock=clock) as ctx:
        fail(ctx, 9, ga.MockModeError)
        assert ctx.health().state == "ready"
        fail(ctx, 5)
        assert not ctx.health().ready
        eventually(lambda: waits_to_probe(ctx))
        clock.advance(1.0)
        eventually(lambda: ctx.health().ready)


def test_kernels_that_do_not_compile_end_readiness_and_the_device_itself_is_probed(tmp_path: Any) -> None:
    clock = MockClock()
    with opened(FaultPlan(), compile_on_mock=True, offline=True, cache_dir=tmp_path, clock=clock) as ctx:
        fail(ctx, 5, ga.CompileError)
        health = ctx.health()
        assert (health.state, health.ready) == ("degraded", False)
        assert "last with CompileError" in health.reason
        eventually(lambda: waits_to_probe(ctx))
        clock.advance(1.0)
        eventually(lambda: ctx.health().ready)


# A probe on demand


def test_a_probe_raises_what_its_launch_raised() -> None:
    with opened(FaultPlan().fail(launch=1, error=ga.LaunchError).lose_context(launch=2)) as ctx:
        with pytest.raises(ga.LaunchError, match="a fault plan"):
            ctx.probe().result(30.0)
        assert ctx.health().failures["flash_attn"] == 1
        with pytest.raises(ga.ContextLost):
            ctx.probe().result(30.0)
    with pytest.raises((ga.ActorStopped, ga.ContextLost)):
        ctx.probe().result(30.0)


def test_a_probe_of_a_device_that_hangs_ends_by_its_timeout() -> None:
    clock = MockClock()
    with opened(FaultPlan().hang(launch=1), clock=clock, hang_timeout=1e6, drain_timeout=0.1) as ctx:
        probe = ctx.probe(timeout=5.0)
        eventually(lambda: ctx.stats()["flash_attn"].in_flight == 1)
        clock.advance(6.0)
        with pytest.raises(ga.DeadlineExceeded):
            probe.result(30.0)


def test_a_probe_that_succeeds_ends_no_row_of_failed_requests() -> None:
    plan = FaultPlan().fail(launch=1).fail(launch=3).fail(launch=5)
    with opened(plan, degraded_after=3) as ctx:
        for failures in (1, 2):
            fail(ctx, 1)
            assert ctx.probe().result(30.0) is None
            assert (probes(ctx), ctx.health().failures["flash_attn"]) == (2 * failures, failures)
        fail(ctx, 1)
        assert not ctx.health().ready
        ctx.probe().result(30.0)
        assert (ctx.health().ready, ctx.health().failures["flash_attn"]) == (True, 2), "one more failure ends it"


# A user's own actors


def test_an_actor_of_ones_own_that_fails_too_often_stops_alone() -> None:
    heard: list[ga.Terminated] = []
    with supervised() as (ctx, worker, sibling):
        worker.watch(heard.append)
        for times in range(1, 6):
            crash(worker)
            alive(worker, times)
        held = worker.submit(lambda actor, call: actor.__dict__.setdefault("kept", []).append(call))
        crash(worker)
        with pytest.raises(ga.ActorStopped):
            held.result(30.0)
        eventually(lambda: worker.state == "failed")
        with pytest.raises(ga.ActorStopped, match="worker failed more often than its restart policy allows"):
            worker.submit(answer(None)).result(30.0)
        health = ctx.health()
        assert (health.state, health.ready, health.reason) == ("degraded", True, "worker is failed")
        assert isinstance(heard[0].error, ga.ActorFailed)
        assert sibling.submit(answer("still here")).result(30.0) == "still here"
        assert ask(ctx).result(30.0).out.shape == (1, 1, 1, 8)


def test_what_an_actor_of_ones_own_breaks_is_not_taken_from_the_others_allowance() -> None:
    with supervised(ga.RestartPolicy(max_restarts=2, backoff=0.0)) as (ctx, worker, sibling):
        for times in (1, 2):
            for actor in (worker, sibling):
                crash(actor)
                alive(actor, times)
        break_down(ctx.flash_attn)
        assert ask(ctx).result(30.0).out.shape == (1, 1, 1, 8)
        assert ctx.health().ready


def test_an_actor_that_fails_slowly_for_ever_is_noticed() -> None:
    clock = MockClock()
    with supervised(ga.RestartPolicy(window=10.0, backoff=0.0), clock=clock) as (ctx, worker, _):
        for times in range(1, 6):
            crash(worker)
            eventually(lambda times=times: worker.restarts == times and worker.state == "running")
            clock.advance(11.0)
        health = ctx.health()
        assert (health.state, health.ready, health.failures["worker"]) == ("degraded", True, 5)
        assert health.reason == "worker has failed 5 times in a row, last with ZeroDivisionError: on purpose"
        alive(worker, 5)
        assert (ctx.health().state, ctx.health().failures["worker"]) == ("ready", 0)


def test_a_built_in_actor_that_fails_slowly_for_ever_ends_readiness() -> None:
    clock = MockClock()
    with supervised(ga.RestartPolicy(window=10.0, backoff=0.0), clock=clock) as (ctx, _, _):
        for times in range(1, 6):
            break_down(ctx.flash_attn)
            eventually(lambda times=times: ctx.flash_attn.restarts == times)
            if times < 5:
                clock.advance(11.0)
        eventually(lambda: ctx.flash_attn.state == "running")
        assert (ctx.health().state, ctx.health().ready) == ("degraded", False)
        eventually(lambda: waits_to_probe(ctx))
        clock.advance(1.0)
        eventually(lambda: ctx.health().ready)
