"""Metrics agree with the context's own counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from support.service import Gate, answer, ask, eventually, launches, raises, rows, scripted

import gpu_actors as ga
from gpu_actors.metrics import ContextCollector
from gpu_actors.testing import FaultPlan, MockClock


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_a_scrape_shows_what_happened(registry: CollectorRegistry) -> None:
    plan = FaultPlan().fail(launch=2)
    with ga.open_context("mock", ga.ContextOptions(fault_plan=plan)) as ctx:
        registry.register(ContextCollector(ctx))
        q = rows()
        ctx.flash_attn.forward(q, q, q).result(10)
        with pytest.raises(ga.LaunchError):
            ctx.flash_attn.forward(q, q, q).result(10)

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"gpu_actors_{name}", labels)

        assert value("requests_submitted_total", actor="flash_attn") == 2
        assert value("requests_total", actor="flash_attn", outcome="completed") == 1
        assert value("requests_total", actor="flash_attn", outcome="failed") == 1
        assert value("launches_total", actor="flash_attn") == 2
        assert value("ready", device="mock") == 1
        assert value("generation", device="mock") == 1
        assert value("state", device="mock", state="ready") == 1
        assert value("state", device="mock", state="failed") == 0
        assert value("cubin_cache_events_total", event="compiles") == 0
        assert b"# HELP gpu_actors_requests_waiting" in generate_latest(registry)
    assert value("ready", device="mock") == 0
    assert value("state", device="mock", state="stopped") == 1


def test_a_lost_context_is_a_state_and_a_generation(registry: CollectorRegistry) -> None:
    with ga.open_context("mock", ga.ContextOptions(fault_plan=FaultPlan().lose_context(launch=1))) as ctx:
        registry.register(ContextCollector(ctx))
        with pytest.raises(ga.ContextLost):
            ask(ctx).result(10)
        assert registry.get_sample_value("gpu_actors_state", {"device": "mock", "state": "failed"}) == 1
        assert registry.get_sample_value("gpu_actors_state", {"device": "mock", "state": "ready"}) == 0
        assert registry.get_sample_value("gpu_actors_generation", {"device": "mock"}) == 2


def test_errors_are_counted_by_their_type(registry: CollectorRegistry) -> None:
    with scripted() as (ctx, actor):
        registry.register(ContextCollector(ctx))
        with pytest.raises(ga.InvalidRequest):
            ask(ctx, softcap=-1.0).result(10)
        with pytest.raises(ga.ActorFailed):
            actor.submit(raises(ZeroDivisionError())).result(10)

        def count(actor: str, error: str) -> float | None:
            return registry.get_sample_value("gpu_actors_request_errors_total", {"actor": actor, "error": error})

        assert count("flash_attn", "InvalidRequest") == 1
        assert count("scripted", "ActorFailed") == 1
        assert count("flash_attn", "DeadlineExceeded") is None
        stats = ctx.stats()["flash_attn"]
        assert (stats.errors, stats.failed) == ({"InvalidRequest": 1}, 1)


def test_histograms_tell_latency_queue_time_and_batch_size(registry: CollectorRegistry) -> None:
    """By the context's clock, one request waits 0.3 s for its launch, which takes 2 s; another is cancelled."""
    clock = MockClock()
    with scripted(clock=clock, max_in_flight=1) as (ctx, actor):
        registry.register(ContextCollector(ctx))
        first, second = Gate(), Gate()
        before = actor.submit(launches(first))
        assert first.entered.wait(30)
        reply, cancelled = actor.submit(launches(second)), actor.submit(answer(1))
        clock.advance(0.3)
        assert cancelled.cancel()
        first.open()
        before.result(30)
        assert second.entered.wait(30)
        eventually(lambda: actor.stats().in_flight == 1)
        clock.advance(2.0)
        second.open()
        reply.result(30)

        def below(name: str, bound: str, **labels: str) -> float | None:
            given = {"actor": "scripted", "le": bound, **labels}
            return registry.get_sample_value(f"gpu_actors_{name}_bucket", given)

        assert [below("request_queue_seconds", bound) for bound in ("0.0001", "0.25", "0.5", "+Inf")] == [1, 1, 2, 2]
        completed = {"outcome": "completed"}
        seconds = [below("request_seconds", bound, **completed) for bound in ("0.25", "0.5", "2.5", "+Inf")]
        assert seconds == [0, 1, 2, 2]
        assert below("request_seconds", "+Inf", outcome="cancelled") == 1
        assert below("request_seconds", "+Inf", outcome="failed") == 0
        assert [below("request_launch_seconds", bound) for bound in ("1.0", "2.5", "+Inf")] == [1, 2, 2]
        assert below("launch_requests", "1.0") == below("launch_requests", "+Inf") == 2
        total = registry.get_sample_value("gpu_actors_request_seconds_sum", {"actor": "scripted", **completed})
        assert total == pytest.approx(0.3 + 2.3)


def test_compilations_are_timed_and_cached_ones_are_not(registry: CollectorRegistry, tmp_path: Path) -> None:
    source = 'extern "C" __global__ void k(int* p) { p[0] = %d; }'
    with ga.open_context("mock", ga.ContextOptions(cache_dir=tmp_path)) as ctx:
        registry.register(ContextCollector(ctx))
        for number in (7, 7, 8):
            ctx.nvrtc.compile(ga.KernelSource("k", source % number, ("k",))).result(60)
        with pytest.raises(ga.CompileError):
            ctx.nvrtc.compile(ga.KernelSource("broken", "int", ("k",))).result(60)
        assert registry.get_sample_value("gpu_actors_compile_seconds_count") == 3
        assert registry.get_sample_value("gpu_actors_compile_seconds_sum") > 0
        labels = {"device": "mock", "name": ctx.info.name, "arch": ctx.info.arch}
        assert registry.get_sample_value("gpu_actors_device_info", labels) == 1


def test_requests_are_timed_from_the_first_collection_on() -> None:
    with scripted() as (ctx, actor):
        actor.submit(answer(1)).result(30)
        assert actor._cell.mailbox.meter is None
        first, second = CollectorRegistry(), CollectorRegistry()
        for registry in (first, second):
            registry.register(ContextCollector(ctx))
        actor.submit(answer(1)).result(30)
        labels = {"actor": "scripted", "outcome": "completed"}
        assert [r.get_sample_value("gpu_actors_request_seconds_count", labels) for r in (first, second)] == [1, 1]
        meter = actor._cell.mailbox.meter
        assert meter is not None
        assert not meter._accepted
        assert not meter._launched
