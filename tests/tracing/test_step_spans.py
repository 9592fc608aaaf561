"""A model's step is one span, with its layers as events."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from support.service import run_python

import gpu_actors as ga
from gpu_actors.testing import FaultPlan

SIZES: dict[str, Any] = {
    "num_blocks": 8, "page_size": 4, "kv_heads": 1, "head_dim": 8, "dtype": "float32", "layers": 3,
}  # fmt: skip
ROW = np.ones((1, 1, 1, 8), np.float32)


def attend(step: ga.KvStep) -> None:
    for layer in range(3):
        step.attend(layer, ROW, ROW, ROW)


def steps(events: list[ga.TraceEvent]) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for event in events:
        if event.name.startswith("step."):
            fields = dict(event.fields)
            assert fields.pop("actor") == "kv_cache"
            fields.pop("request")
            found.append((event.name, fields))
    return found


def test_layers_lie_between_the_begin_and_the_end() -> None:
    events: list[ga.TraceEvent] = []
    with ga.open_context("mock", ga.ContextOptions(on_event=events.append)) as ctx, ctx.kv_cache(**SIZES) as cache:
        seq = cache.create().result(20)
        with cache.step([seq], heads_q=1).result(20) as step:
            attend(step)
        layers = [("step.layer", {"layer": layer, "captured": False}) for layer in range(3)]
        begun = ("step.begun", {"sequences": 1, "layers": 3})
        assert steps(events) == [begun, *layers, ("step.ended", {"committed": True, "error": None})]
        events.clear()
        cache.step([seq], heads_q=1).result(20).abort().result(20)
        assert steps(events) == [begun, ("step.ended", {"committed": False, "error": None})]


@pytest.mark.parametrize("fault", [1, 2, 3])
def test_a_step_that_fails_ends_with_its_error(fault: int) -> None:
    events: list[ga.TraceEvent] = []
    plan = FaultPlan().fail(launch=fault, error=ga.LaunchError("a fault"))
    options = ga.ContextOptions(on_event=events.append, fault_plan=plan)
    with ga.open_context("mock", options) as ctx, ctx.kv_cache(**SIZES) as cache:
        seq = cache.create().result(20)
        step = cache.step([seq], heads_q=1).result(20)
        with pytest.raises(ga.LaunchError):
            attend(step)
        cache.append([seq], *np.ones((2, 3, 1, 1, 1, 8), np.float32)).result(20)  # waits for the end of the step
        name, fields = steps(events)[-1]
        assert (name, fields["committed"], str(fields["error"])) == ("step.ended", False, "a fault")
        assert len(steps(events)) == 2 + fault - 1


def test_opentelemetry_has_one_span_a_step_with_its_layers_as_events() -> None:
    """The provider is global, so the test runs in another process."""
    done = run_python(
        """
        import json
        import numpy as np
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        import gpu_actors as ga

        exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        trace.set_tracer_provider(provider)
        row = np.ones((1, 1, 1, 8), np.float32)
        sizes = dict(num_blocks=8, page_size=4, kv_heads=1, head_dim=8, dtype="float32", layers=2)
        with ga.open_context("mock") as ctx, ctx.kv_cache(**sizes) as cache:
            seq = cache.create().result(20)
            with cache.step([seq], heads_q=1).result(20) as step:
                for layer in range(2):
                    step.attend(layer, row, row, row)
        finished = exporter.get_finished_spans()
        spans = [span for span in finished if span.name == "gpu_actors.kv_step"]
        names = {span.context.span_id: span.attributes.get("gpu_actors.message") for span in finished}
        print(json.dumps([
            [
                names[span.parent.span_id],
                span.attributes["gpu_actors.layers"],
                [[event.name, event.attributes["gpu_actors.layer"]] for event in span.events],
            ]
            for span in spans
        ]))
        """
    )
    assert json.loads(done.stdout) == [["BeginStep", "2", [["step.layer", 0], ["step.layer", 1]]]]
