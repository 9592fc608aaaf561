"""Tracing: log records, listeners, OpenTelemetry spans and trace files; and nothing at all when nobody looks."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from service_support import Gate, Scripted, answer, eventually, launches, raises, rows, run_python, scripted

import gpu_actors as ga
from gpu_actors.testing import FaultPlan
from gpu_actors.tracing import Trace, events

pytestmark = pytest.mark.usefixtures("all_threads_end")


def ask(ctx: ga.GpuContext, **options: Any) -> ga.Reply[ga.AttentionOutput]:
    return ctx.flash_attn.forward(rows(), rows(), rows(), **options)


def of(seen: list[ga.TraceEvent], reply: ga.Reply[Any]) -> list[ga.TraceEvent]:
    """The events of one request."""
    call = reply._call
    return [e for e in seen if (e.fields.get("actor"), e.fields.get("request")) == (call.mailbox.name, call.number)]


def names(seen: list[ga.TraceEvent]) -> list[str]:
    return [event.name for event in seen]


# Listeners


def test_a_request_is_accepted_launched_and_completed() -> None:
    seen: list[ga.TraceEvent] = []
    with ga.open_context("mock", ga.ContextOptions(on_event=seen.append)) as ctx:
        reply = ask(ctx)
        reply.result(5.0)
        key = ctx.flash_attn.inspect_key(ga.FlashForward(q=rows(), k=rows(), v=rows()))
    accepted, launched, completed = of(seen, reply)
    assert names([accepted, launched, completed]) == ["request.accepted", "request.launched", "request.completed"]
    assert (accepted.fields["actor"], accepted.fields["message"]) == ("flash_attn", "FlashForward")
    assert accepted.thread == threading.current_thread().name
    assert launched.fields["key"] == key
    assert accepted.time <= launched.time <= completed.time


@pytest.mark.parametrize(
    ("wrong", "error"),
    [({"softcap": -1.0}, ga.InvalidRequest), ({"priority": "x"}, ga.InvalidRequest), ({"timeout": -1}, TimeoutError)],
)
def test_a_request_that_is_refused_is_accepted_and_failed(wrong: dict[str, Any], error: type) -> None:
    seen: list[ga.TraceEvent] = []
    with ga.open_context("mock", ga.ContextOptions(on_event=seen.append)) as ctx:
        reply = ask(ctx, **wrong)
        with pytest.raises(error):
            reply.result(5.0)
    trace = of(seen, reply)
    assert names(trace) == ["request.accepted", "request.failed"]
    assert isinstance(trace[1].fields["error"], error)


def test_every_ending_of_a_request_is_traced_once() -> None:
    seen: list[ga.TraceEvent] = []
    with scripted(on_event=seen.append, max_in_flight=1, mailbox_capacity=4) as (_, actor):
        gate = Gate()
        launched = actor.submit(launches(gate))
        assert gate.entered.wait(5.0)
        cancelled = actor.submit(answer(None))
        expired = actor.submit(answer(None), timeout=0.01)
        waiting = [actor.submit(answer(None)) for _ in range(2)]
        overloaded = actor.submit(answer(None))
        cancelled.cancel()
        eventually(expired.done)
        gate.open()
        crashed = actor.submit(raises(ZeroDivisionError()))
        for reply in (launched, *waiting, crashed):
            eventually(reply.done)
        eventually(lambda: "actor.restarted" in names(seen))
    endings = {
        launched: "completed",
        cancelled: "RequestCancelled",
        expired: "DeadlineExceeded",
        overloaded: "Overloaded",
        crashed: "ActorFailed",
        **dict.fromkeys(waiting, "completed"),
    }
    for reply, ending in endings.items():
        trace = of(seen, reply)
        assert trace[0].name == "request.accepted"
        last = trace[-1]
        assert ending == ("completed" if last.name == "request.completed" else type(last.fields["error"]).__name__)
        assert Counter(names(trace)).most_common(1)[0][1] == 1
    (restarted,) = [event for event in seen if event.name == "actor.restarted"]
    assert (restarted.fields["actor"], restarted.fields["restarts"]) == ("scripted", 1)
    assert isinstance(restarted.fields["error"], ZeroDivisionError)


def test_the_loss_of_the_context_is_traced_with_its_generation() -> None:
    seen: list[ga.TraceEvent] = []
    options = ga.ContextOptions(on_event=seen.append, fault_plan=FaultPlan().lose_context(launch=1))
    with ga.open_context("mock", options) as ctx:
        reply = ask(ctx)
        with pytest.raises(ga.ContextLost):
            reply.result(5.0)
    (lost,) = [event for event in seen if event.name == "context.lost"]
    assert lost.fields["generation"] == 1
    assert isinstance(lost.fields["error"], ga.ContextLost)
    assert names(of(seen, reply)) == ["request.accepted", "request.launched", "request.failed"]


@pytest.mark.parametrize("error", [ZeroDivisionError(), SystemExit(3), KeyboardInterrupt()])
def test_a_listener_that_raises_harms_no_request(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    here = threading.current_thread()

    def listen(event: ga.TraceEvent) -> None:
        # The main thread's own SystemExit and KeyboardInterrupt are not for a service to swallow.
        if isinstance(error, Exception) or threading.current_thread() is not here:
            raise error

    with scripted(on_event=listen) as (ctx, actor):
        assert actor.submit(answer(1)).result(5.0) == 1
        assert actor.submit(launches(lambda: None, 2)).result(5.0) == 2
        with pytest.raises(ga.DeadlineExceeded):
            actor.submit(lambda actor, call: None, timeout=0.01).result(5.0)
        with pytest.raises(ga.DeadlineExceeded):
            actor.submit(lambda actor, call: None, timeout=0.01).result(5.0)
        with pytest.raises(ga.ActorFailed):
            actor.submit(raises(ZeroDivisionError())).result(5.0)
        assert actor.submit(answer(3)).result(5.0) == 3
        eventually(lambda: ctx.stats()["scripted"].in_flight == 0)
        assert ctx.health().ready
    assert "a trace listener raised on request.completed" in caplog.text


def test_a_logger_that_raises_keeps_no_waiter_waiting(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            if threading.current_thread() is not threading.main_thread():
                raise ZeroDivisionError("in a filter")
            return True

    refusing = Refusing()
    events.logger.addFilter(refusing)
    try:
        with caplog.at_level(logging.DEBUG, "gpu_actors.trace"), scripted() as (ctx, actor):
            assert actor.submit(launches(lambda: None, 2)).result(5.0) == 2
            assert actor.submit(answer(1)).result(5.0) == 1
            with pytest.raises(ga.DeadlineExceeded):
                actor.submit(lambda actor, call: None, timeout=0.01).result(5.0)
            assert actor.restarts == 0
            eventually(lambda: ctx.stats()["scripted"].in_flight == 0)
    finally:
        events.logger.removeFilter(refusing)


# Logging


def test_events_are_log_records_with_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "gpu_actors.trace"), ga.open_context("mock") as ctx:
        ask(ctx).result(5.0)
        with pytest.raises(ga.InvalidRequest):
            ask(ctx, softcap=-1.0).result(5.0)
    records = [record for record in caplog.records if record.name == "gpu_actors.trace"]
    assert [record.event for record in records][:3] == ["request.accepted", "request.launched", "request.completed"]  # type: ignore[attr-defined]
    assert records[0].fields["message"] == "FlashForward"  # type: ignore[attr-defined]
    assert records[0].getMessage().startswith("request.accepted {'actor': 'flash_attn', 'request': 1")
    assert {record.levelno for record in records} == {logging.DEBUG}


def test_what_an_operator_must_see_is_logged_above_debug(caplog: pytest.LogCaptureFixture) -> None:
    plan = FaultPlan().lose_context(launch=1)
    with caplog.at_level(logging.WARNING, "gpu_actors.trace"), scripted(fault_plan=plan) as (ctx, actor):
        with pytest.raises(ga.ActorFailed):
            actor.submit(raises(ZeroDivisionError())).result(5.0)
        eventually(lambda: actor.restarts == 1 and actor.state == "running")
        with pytest.raises(ga.ContextLost):
            ask(ctx).result(5.0)
    levels = {record.event: record.levelname for record in caplog.records if record.name == "gpu_actors.trace"}  # type: ignore[attr-defined]
    assert levels == {"actor.restarted": "WARNING", "context.lost": "ERROR"}


# Off


def test_nothing_is_built_when_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any, **fields: Any) -> None:
        raise AssertionError(f"built {arguments}")

    monkeypatch.setattr(events, "TraceEvent", never)
    monkeypatch.setattr(Trace, "emit", never)
    assert not events.logger.isEnabledFor(logging.DEBUG)
    with scripted() as (ctx, actor):
        ask(ctx).result(5.0)
        actor.submit(answer(1)).result(5.0)
        with pytest.raises(ga.InvalidRequest):
            ask(ctx, softcap=-1.0).result(5.0)
        assert not ctx._services.trace.active


def test_a_request_made_before_anybody_looked_stays_out_of_the_trace(caplog: pytest.LogCaptureFixture) -> None:
    with scripted() as (_, actor):
        gate = Gate()
        reply = actor.submit(launches(gate))
        assert gate.entered.wait(5.0)
        with caplog.at_level(logging.DEBUG, "gpu_actors.trace"):
            gate.open()
            reply.result(5.0)
    assert not [record for record in caplog.records if record.name == "gpu_actors.trace"]


# Trace files


def load(path: Path) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The events of a trace file, and the names of its tracks."""
    document = json.loads(path.read_text())
    tracks = {e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M"}
    return [event for event in document["traceEvents"] if event["ph"] != "M"], tracks


def balanced(recorded: list[dict[str, Any]]) -> None:
    """Every beginning has its end, in order, and nothing ends that did not begin."""
    open_now: dict[tuple[str, str], float] = {}
    for event in recorded:
        identity = (event["cat"], event.get("id", ""))
        if event["ph"] == "b":
            assert identity not in open_now
            open_now[identity] = event["ts"]
        elif event["ph"] == "e":
            assert event["ts"] >= open_now.pop(identity)
    assert not open_now
    times = [event["ts"] for event in recorded]
    assert times == sorted(times)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def test_a_trace_file_is_balanced_named_and_in_order(path: Path) -> None:
    with ga.ChromeTrace(path) as trace, scripted(on_event=trace) as (ctx, actor):
        replies = [ask(ctx) for _ in range(20)] + [ask(ctx, softcap=-1.0)]
        replies.append(actor.submit(raises(ZeroDivisionError())))
        for reply in replies:
            eventually(reply.done)
        eventually(lambda: actor.restarts == 1)
    recorded, tracks = load(path)
    balanced(recorded)
    assert set(tracks.values()) == {"flash_attn", "scripted"}
    assert all(event["tid"] in tracks and event["pid"] == 1 for event in recorded)
    assert Counter(event["name"] for event in recorded if event["ph"] == "b") == {
        "FlashForward": 21,
        "launch": 20,
        "function": 1,
    }
    assert [event["name"] for event in recorded if event["ph"] == "i"] == ["actor.restarted"]


def test_what_is_open_when_a_trace_is_written_is_closed_in_the_file(path: Path) -> None:
    trace = ga.ChromeTrace(path)
    with scripted(on_event=trace) as (_, actor):
        gate = Gate()
        reply = actor.submit(launches(gate))
        assert gate.entered.wait(5.0)
        eventually(lambda: ("launch", "scripted#1") in trace._open)
        trace.write()
        balanced(load(path)[0])
        gate.open()
        reply.result(5.0)
    trace.write()
    balanced(load(path)[0])


def test_events_that_cross_leave_the_file_balanced(path: Path) -> None:
    """A deadline may pass between a launch and the event that tells of it; a compile of one kernel may run twice."""
    trace = ga.ChromeTrace(path)

    def event(name: str, time: int, **fields: Any) -> None:
        trace(ga.TraceEvent(name, time * 1000, "t", fields))

    event("request.accepted", 1, actor="a", request=1, message="M")
    event("compile.started", 2, variant="v", digest="1", arch="sm_80")
    event("compile.started", 3, variant="v", digest="2", arch="sm_90a")
    event("request.failed", 5, actor="a", request=1, error=ga.DeadlineExceeded("x"))
    event("request.launched", 6, actor="a", request=1, key="k")
    event("request.compiling", 7, actor="a", request=1, key="k")
    event("compile.completed", 9, variant="v", digest="1", arch="sm_80", seconds=1.0, error=None)
    event("cache.hit", 4, variant="v", digest="1", layer="memory")
    trace.write()
    recorded, _ = load(path)
    balanced(recorded)
    ends = {event["id"]: event["ts"] for event in recorded if event["ph"] == "e"}
    assert ends == {"request:a#1": 5.0, "compile:v 1": 9.0, "compile:v 2": 9.0}


def test_an_empty_trace_is_a_file_too(path: Path) -> None:
    with ga.ChromeTrace(path):
        pass
    assert load(path) == ([], {})


# OpenTelemetry


@pytest.fixture(scope="module")
def spans() -> dict[str, Any]:
    """What a program with a tracer provider exports. The provider is global, so it has a process of its own."""
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
    recorded = json.loads(done.stdout)
    return {"all": recorded, "requests": [span for span in recorded if span["name"] == "gpu_actors.request"]}


def test_a_requests_span_lies_under_the_callers(spans: dict[str, Any]) -> None:
    assert [span["parent"] for span in spans["requests"]].count(None) == 1
    assert {span["parent"] for span in spans["requests"]} == {"first", "second", "refused", "lost", None}
    for span in spans["requests"]:
        assert span["attributes"] == {"gpu_actors.actor": "flash_attn", "gpu_actors.message": "FlashForward"}


def test_a_launch_is_a_child_span(spans: dict[str, Any]) -> None:
    launches = [span for span in spans["all"] if span["name"] == "gpu_actors.launch"]
    assert {span["parent"] for span in launches} == {"gpu_actors.request"}
    assert sorted(str(span["grandparent"]) for span in launches) == ["None", "first", "lost", "second"]
    assert all("kernel=" in span["attributes"]["gpu_actors.key"] for span in launches)


def test_a_failed_requests_span_says_so(spans: dict[str, Any]) -> None:
    by_parent = {span["parent"]: span for span in spans["requests"]}
    refused = by_parent["refused"]
    assert (refused["status"], refused["events"]) == ("ERROR", ["exception"])
    assert "softcap=-1.0" in refused["description"]
    assert by_parent["lost"]["status"] == "ERROR"
    assert by_parent["first"]["status"] == "UNSET"
    (lost,) = [span for span in spans["all"] if span["name"] == "gpu_actors.context.lost"]
    assert lost["attributes"]["gpu_actors.generation"] == "1"


def test_spans_have_the_callers_time(spans: dict[str, Any]) -> None:
    by_name = {span["name"]: span for span in spans["all"]}
    for span in spans["requests"]:
        assert span["start"] <= span["end"]
        if span["parent"] is not None:
            caller = by_name[span["parent"]]
            assert caller["start"] - 5_000_000 <= span["start"] <= caller["end"] + 5_000_000


def test_without_a_provider_no_listener_is_made() -> None:
    from gpu_actors.tracing.otel import otel_listener

    assert otel_listener() is None


@pytest.fixture
def no_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)


@pytest.mark.usefixtures("no_opentelemetry")
def test_opentelemetry_is_not_needed() -> None:
    seen: list[ga.TraceEvent] = []
    with ga.open_context("mock", ga.ContextOptions(on_event=seen.append, actors=(Scripted,))) as ctx:
        ask(ctx).result(5.0)
    assert names(seen)[0] == "request.accepted"
