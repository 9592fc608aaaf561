"""Metrics say what the context's own counts say."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from service_support import rows

import gpu_actors as ga
from gpu_actors.metrics import ContextCollector
from gpu_actors.testing import FaultPlan


def test_a_scrape_shows_what_happened() -> None:
    plan = FaultPlan().fail(launch=2)
    with ga.open_context("mock", ga.ContextOptions(fault_plan=plan)) as ctx:
        registry = CollectorRegistry()
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
        assert value("ready") == 1
        assert value("generation") == 1
        assert value("cubin_cache_events_total", event="compiles") == 0
        assert b"# HELP gpu_actors_requests_waiting" in generate_latest(registry)
    assert value("ready") == 0
