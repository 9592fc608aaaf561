"""OpenTelemetry: a span for each request under its caller's, with its launch below."""

from __future__ import annotations

import json
import sys

import pytest
from support.service import Scripted, ask, run_python

import gpu_actors as ga

pytestmark = pytest.mark.usefixtures("all_threads_end")


def test_a_requests_span_lies_under_the_callers_with_its_launch_below() -> None:
    """The provider is global, so the test runs in another process."""
    done = run_python(
        """
        import asyncio, json, threading
        import numpy as np
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        import gpu_actors as ga
        from gpu_actors.testing import FaultPlan

        exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        trace.set_tracer_provider(provider)
        tracer = trace.get_tracer("caller")
        q = np.ones((1, 1, 1, 8), np.float32)

        async def main(ctx):
            async def ask(name, **options):
                with tracer.start_as_current_span(name):
                    try:
                        await ctx.flash_attn.forward(q, q, q, **options)
                    except ga.GpuActorsError:
                        pass
            await asyncio.gather(ask("first"), ask("second"), ask("refused", softcap=-1.0))
            await ctx.flash_attn.forward(q, q, q)

        options = ga.ContextOptions(fault_plan=FaultPlan().lose_context(launch=4))
        with ga.open_context("mock", options) as ctx:
            asyncio.run(main(ctx))
            with tracer.start_as_current_span("lost"):
                try:
                    ctx.flash_attn.forward(q, q, q).result()
                except ga.ContextLost:
                    pass
        by_id = {span.context.span_id: span for span in exporter.get_finished_spans()}

        def parent(span):
            return by_id[span.parent.span_id] if span and span.parent else None

        def name(span):
            return span and span.name

        print(json.dumps([
            {
                "name": span.name,
                "parent": name(parent(span)),
                "grandparent": name(parent(parent(span))),
                "attributes": dict(span.attributes),
                "status": span.status.status_code.name,
                "description": span.status.description,
                "events": [event.name for event in span.events],
                "start": span.start_time,
                "end": span.end_time,
            }
            for span in by_id.values()
        ]))
        """
    )
    spans = json.loads(done.stdout)
    requests = [span for span in spans if span["name"] == "gpu_actors.request"]
    assert [span["parent"] for span in requests].count(None) == 1
    assert {span["parent"] for span in requests} == {"first", "second", "refused", "lost", None}
    by_name, by_parent = (
        {span[key]: span for span in result} for key, result in (("name", spans), ("parent", requests))
    )
    for span in requests:
        assert span["attributes"] == {"gpu_actors.actor": "flash_attn", "gpu_actors.message": "FlashForward"}
        assert span["start"] <= span["end"]
        if span["parent"] is not None:
            caller = by_name[span["parent"]]
            assert caller["start"] - 5_000_000 <= span["start"] <= caller["end"] + 5_000_000
    launches = [span for span in spans if span["name"] == "gpu_actors.launch"]
    assert {span["parent"] for span in launches} == {"gpu_actors.request"}
    assert sorted(str(span["grandparent"]) for span in launches) == ["None", "first", "lost", "second"]
    assert all("kernel=" in span["attributes"]["gpu_actors.key"] for span in launches)
    assert {span["attributes"]["gpu_actors.kernel"] for span in launches} == {"oracle"}
    refused = by_parent["refused"]
    assert (refused["status"], refused["events"]) == ("ERROR", ["exception"])
    assert "softcap=-1.0" in refused["description"]
    assert (by_parent["lost"]["status"], by_parent["first"]["status"]) == ("ERROR", "UNSET")
    (lost,) = [span for span in spans if span["name"] == "gpu_actors.context.lost"]
    assert lost["attributes"]["gpu_actors.generation"] == "1"


def test_without_a_provider_no_listener_is_made() -> None:
    from gpu_actors.tracing.otel import otel_listener

    assert otel_listener() is None


def test_opentelemetry_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    seen: list[ga.TraceEvent] = []
    with ga.open_context("mock", ga.ContextOptions(on_event=seen.append, actors=(Scripted,))) as ctx:
        ask(ctx).result(30.0)
    assert seen[0].name == "request.accepted"
