"""From a client's request through its text and the steps to the launches: OpenTelemetry, trace files and the log."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import propagate, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision, StaticSampler
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from support.openai_server import CHAT, HELLO, Serving
from support.service import eventually
from support.streams import asking

import gpu_actors as ga
from gpu_actors.server.openai.server import JsonLines

COMPLETIONS = "/v1/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
SLOW = ga.ContextOptions(mock=ga.MockOptions(dtype="float32", latency=0.005))


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """The exported spans of a program with a tracer provider, which is global and is removed afterwards."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


class Spans:
    """The ended spans, by name and by parent."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self.all = exporter.get_finished_spans()
        self.by_id = {self.id_of(span): span for span in self.all}

    @staticmethod
    def id_of(span: ReadableSpan) -> int:
        assert span.context is not None
        return span.context.span_id

    @staticmethod
    def trace_of(span: ReadableSpan) -> str:
        assert span.context is not None
        return f"{span.context.trace_id:032x}"

    def of(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]

    def above(self, span: ReadableSpan) -> ReadableSpan | None:
        return None if span.parent is None else self.by_id.get(span.parent.span_id)

    def names_above(self, span: ReadableSpan) -> list[str]:
        names = []
        above = self.above(span)
        while above is not None:
            names.append(above.name)
            above = self.above(above)
        return names

    def linked(self, span: ReadableSpan) -> set[int]:
        return {link.context.span_id for link in span.links}


def spans_of(exporter: InMemorySpanExporter, requests: int = 1, name: str = f"POST {COMPLETIONS}") -> Spans:
    eventually(lambda: len([span for span in exporter.get_finished_spans() if span.name == name]) >= requests)
    return Spans(exporter)


def test_one_trace_leads_from_the_clients_span_to_the_launches(exporter: InMemorySpanExporter) -> None:
    with Serving() as serving:
        serving.until_idle()
        exporter.clear()
        headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1,other=2", "X_Request_Id": "mine"}
        serving.stream(COMPLETIONS, {**HELLO, "max_tokens": 5}, **headers)
        serving.until_idle()
        spans = spans_of(exporter)
    (server,) = spans.of(f"POST {COMPLETIONS}")
    assert server.parent is not None
    assert server.context is not None
    assert server.attributes is not None
    assert f"{server.parent.span_id:016x}" == PARENT
    assert {spans.trace_of(span) for span in spans.all} == {TRACE}, "all of it is one trace"
    assert server.context.trace_state.to_header() == "vendor=1,other=2"
    assert server.kind is trace.SpanKind.SERVER
    expected = {"http.route": COMPLETIONS, "http.response.status_code": 200, "gpu_actors.request_id": "mine"}
    assert expected.items() <= dict(server.attributes).items()
    (text,) = spans.of("gpu_actors.text")
    assert spans.above(text) is server
    assert text.context is not None
    assert text.context.trace_state.to_header() == "vendor=1,other=2"
    assert dict(text.attributes or {}) == {
        "gpu_actors.prompt_tokens": 6,
        "gpu_actors.cached_tokens": 0,
        "gpu_actors.completion_tokens": 5,
        "gpu_actors.reason": "length",
    }
    parts = [spans.of(f"gpu_actors.{name}") for name in ("queue", "prefill", "decode")]
    assert [len(found) for found in parts] == [1, 1, 1]
    queue, prefill, decode = (found[0] for found in parts)
    assert all(spans.above(part) is text for part in (queue, prefill, decode))
    assert dict(prefill.attributes or {}) == {"gpu_actors.rows": 6}
    assert dict(decode.attributes or {}) == {"gpu_actors.tokens": 5}
    assert server.start_time == queue.start_time, "a text's queue begins with the request"
    assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)
    steps = spans.of("gpu_actors.step")
    assert len(steps) == 5
    assert all(spans.linked(step) == {spans.id_of(text)} for step in steps)
    launches = [span for span in spans.of("gpu_actors.launch") if "gpu_actors.step" in spans.names_above(span)]
    assert len(launches) == 5 * 2, "a launch a layer and step"
    above = ["gpu_actors.request", "gpu_actors.step", "gpu_actors.text", f"POST {COMPLETIONS}"]
    assert all(spans.names_above(launch) == above for launch in launches)


def test_the_programs_own_propagator_finds_the_parent(exporter: InMemorySpanExporter, request: Any) -> None:
    """The parent of a text or an embedding, whose requests are below it."""

    class Plain(TraceContextTextMapPropagator):
        _TRACEPARENT_HEADER_NAME = "x-parent"

    former = propagate.get_global_textmap()
    request.addfinalizer(lambda: propagate.set_global_textmap(former))
    propagate.set_global_textmap(Plain())
    with Serving(models=("minilm",)) as serving:
        exporter.clear()
        asked = {"model": "all-MiniLM-L6-v2", "input": ["hello"]}
        assert serving.post("/v1/embeddings", asked, X_Parent=TRACEPARENT).status == 200
        assert serving.ask("/metrics").status == 200, "those of a server that generates nothing"
        spans = spans_of(exporter, name="POST /v1/embeddings")
    requests = spans.of("gpu_actors.request")
    assert requests
    assert all(spans.names_above(span) == ["POST /v1/embeddings"] for span in requests)
    assert {spans.trace_of(span) for span in requests} == {TRACE}


def test_a_step_is_linked_to_every_text_that_it_serves(exporter: InMemorySpanExporter) -> None:
    with Serving(options=SLOW) as serving:
        serving.until_idle()
        exporter.clear()
        with asking(serving.port, COMPLETIONS, {**HELLO, "max_tokens": 60, "stream": True}) as one:
            serving.complete(prompt="another")
            one.answer()
        serving.until_idle()
        spans = spans_of(exporter, 2)
    texts = {spans.id_of(text) for text in spans.of("gpu_actors.text")}
    traces = {spans.trace_of(text) for text in spans.of("gpu_actors.text")}
    assert len(traces) == 2, "each client has a trace of its own"
    shared = [step for step in spans.of("gpu_actors.step") if (step.attributes or {})["gpu_actors.texts"] == 2]
    assert shared
    assert all(spans.linked(step) == texts for step in shared)


def test_a_request_that_misses_its_deadline_is_an_error_and_probes_are_no_spans(exporter: InMemorySpanExporter) -> None:
    with Serving(options=SLOW) as serving:
        serving.until_idle()
        exporter.clear()
        for path in ("/livez", "/readyz", "/", "/status.json"):
            serving.ask(path)
        assert serving.post(COMPLETIONS, {**HELLO, "max_tokens": 900}, X_Deadline_Ms="150").status == 504
        serving.until_idle()
        spans = spans_of(exporter)
    (server,) = (span for span in spans.all if span.kind is trace.SpanKind.SERVER)
    (text,) = spans.of("gpu_actors.text")
    for span, said in ((server, "DeadlineExceeded"), (text, "deadline")):
        assert (span.status.status_code, span.status.description) == (trace.StatusCode.ERROR, said)
    assert (server.attributes or {})["http.response.status_code"] == 504


def test_a_traceparent_that_is_none_begins_a_new_trace(exporter: InMemorySpanExporter) -> None:
    zeros = (f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01")
    with Serving() as serving:
        for given in ("", "00-0-0-01", *zeros, f"ff-{TRACE}-{PARENT}-01", "x" * 5000):
            exporter.clear()
            assert serving.post(COMPLETIONS, HELLO, traceparent=given, tracestate="vendor=1").status == 200
            spans = spans_of(exporter)
            (server,) = spans.of(f"POST {COMPLETIONS}")
            assert server.parent is None
            assert spans.trace_of(server) != TRACE
        serving.until_idle()
        exporter.clear()
        assert serving.post(COMPLETIONS, HELLO, traceparent=f"00-{TRACE}-{PARENT}-00").status == 200
        serving.until_idle()
        assert exporter.get_finished_spans() == (), "its client does not record it"


def test_a_sampler_that_raises_fails_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(StaticSampler):
        def should_sample(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("a full head")

    monkeypatch.setattr(trace, "_TRACER_PROVIDER", TracerProvider(sampler=Broken(Decision.RECORD_AND_SAMPLE)))
    with Serving() as serving:
        serving.complete()
        serving.until_idle()
    assert "the span text could not be recorded" in caplog.text


def line_of(serving: Serving, caplog: pytest.LogCaptureFixture, **headers: str) -> Any:
    caplog.set_level(logging.INFO, "gpu_actors.access")
    caplog.clear()
    serving.post("/v1/chat/completions", CHAT, **headers)
    eventually(lambda: caplog.records)
    record = caplog.records[0]
    line = json.loads(JsonLines().format(record))
    assert line.get("trace_id", "") in record.getMessage()
    return line


def test_the_log_names_the_trace(caplog: pytest.LogCaptureFixture, exporter: InMemorySpanExporter) -> None:
    with Serving() as serving:
        line = line_of(serving, caplog)
    spans = spans_of(exporter, name="POST /v1/chat/completions")
    (server,) = spans.of("POST /v1/chat/completions")
    assert line["trace_id"] == spans.trace_of(server)
    assert line["request_id"] == (server.attributes or {})["gpu_actors.request_id"]


def test_without_opentelemetry_the_log_names_the_clients_trace(caplog: pytest.LogCaptureFixture) -> None:
    with Serving() as serving:
        for given, named in {
            TRACEPARENT: TRACE,
            f"01-{TRACE}-{PARENT}-01-later": TRACE,
            f"{TRACEPARENT}-later": None,
            f"00-{TRACE.upper()}-{PARENT}-01": None,
            f"00-{TRACE}-{PARENT}-01, 00-{TRACE}-{PARENT}-01": None,
            "00-x": None,
        }.items():
            assert line_of(serving, caplog, traceparent=given).get("trace_id") == named
        assert serving.engine.submit([1, 2], max_new_tokens=1).work is None, "without a listener a text has no span"


def test_a_trace_file_leads_from_a_request_to_its_launches(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ga.StreamedTrace(path) as file:
        options = ga.ContextOptions(mock=ga.MockOptions(dtype="float32"), on_event=file)
        with Serving(options=options) as serving:
            assert serving.post(COMPLETIONS, HELLO, X_Request_Id="mine").status == 200
            serving.until_idle()
            serving.ask("/readyz")
    records = json.loads(path.read_text())
    begun = [record for record in records if record["ph"] == "b"]
    (request,) = (record for record in begun if record["cat"] == "requests")
    assert (request["name"], request["args"]["label"]) == (f"POST {COMPLETIONS}", "mine")
    (text,) = (record for record in begun if record["name"] == "text" and record["args"].get("under") == "mine")
    label = text["args"]["label"]
    parts = [record["name"] for record in begun if record["cat"] == "texts" and record["args"].get("under") == label]
    assert parts == ["queue", "prefill", "decode"]
    steps = {
        record["args"]["label"] for record in begun if record["name"] == "step" and label in record["args"]["links"]
    }
    assert len(steps) == HELLO["max_tokens"]
    asked = [record for record in begun if record["cat"] == "request" and record["args"].get("under") in steps]
    assert len(asked) == 2 * len(steps)
    numbers = {record["id"].partition(":")[2] for record in asked}
    assert numbers <= {record["id"].partition(":")[2] for record in begun if record["cat"] == "launch"}
    ends = {(record["cat"], record["id"]) for record in records if record["ph"] == "e"}
    assert {(record["cat"], record["id"]) for record in begun} == ends
    assert "service" in {record["args"]["name"] for record in records if record["name"] == "process_name"}
