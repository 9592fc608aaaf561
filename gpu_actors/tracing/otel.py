"""OpenTelemetry spans out of trace events.

A request's span opens when it is accepted, under the span that was current in the caller (`current_context` is taken
on the caller's thread and travels with the call), and closes with its answer. Waiting for a compilation and the
launch are child spans. A compilation is a span of its own, because any number of requests may wait for it.
`ProgramTracer` makes the spans above: of work that is no request of a context.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gpu_actors._version import __version__
from gpu_actors.tracing.events import Listener, TraceEvent

__all__ = ["PROGRAM_TRACER", "ProgramTracer", "current_context", "otel_listener", "provided"]


def otel_listener() -> Listener | None:
    """A listener that makes spans, or None if OpenTelemetry is absent or no tracer provider is configured."""
    with contextlib.suppress(ImportError):
        importlib.import_module("opentelemetry.trace")
    if not provided():
        return None
    trace = sys.modules["opentelemetry.trace"]
    return _Spans(trace, trace.get_tracer("gpu_actors", __version__))


def provided() -> bool:
    """Whether the program has configured a tracer provider. Imports nothing."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return False
    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider | trace.NoOpTracerProvider)


def current_context() -> Any:
    """The caller's OpenTelemetry context, to be carried by a call."""
    from opentelemetry import context

    return context.get_current()


class ProgramTracer:
    """Makes spans of work that is not a context's request, for programs with a tracer provider (`provided`).

    Times are monotonic nanoseconds. Attributes whose names have a dot are OpenTelemetry's; others get the prefix
    "gpu_actors.".
    """

    def __init__(self) -> None:
        self.epoch: int = time.time_ns() - time.monotonic_ns()

    def start(
        self,
        name: str,
        begin: int,
        *,
        parent: Any = None,
        links: Sequence[Any] = (),
        headers: Mapping[str, list[str]] | None = None,
        server: bool = False,
        fields: Mapping[str, Any],
    ) -> Any:
        """Start a span. parent: a span; None: the current one, or that of the headers if none is current."""
        from opentelemetry import propagate, trace

        context = None if parent is None else trace.set_span_in_context(parent)
        if headers and not trace.get_current_span().get_span_context().is_valid:
            context = propagate.extract(headers)
        return trace.get_tracer("gpu_actors", __version__).start_span(
            name,
            context=context,
            kind=trace.SpanKind.SERVER if server else trace.SpanKind.INTERNAL,
            attributes=_attributes(fields),
            links=[trace.Link(span.get_span_context()) for span in links],
            start_time=self.epoch + begin,
        )

    def end(
        self,
        span: Any,
        end: int,
        name: str = "",
        fields: Mapping[str, Any] = MappingProxyType({}),
        error: BaseException | str | None = None,
    ) -> None:
        """End a span. name: a new name, or an empty string. error: why the work failed."""
        from opentelemetry import trace

        if name:
            span.update_name(name)
        span.set_attributes(_attributes(fields))
        if error is not None:
            span.set_status(trace.Status(trace.StatusCode.ERROR, str(error)))
        span.end(end_time=self.epoch + end)

    def current(self, span: Any) -> Any:
        """A context manager in which the span is current."""
        from opentelemetry import trace

        return trace.use_span(span, record_exception=False, set_status_on_exception=False)


PROGRAM_TRACER = ProgramTracer()


def _attributes(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name if "." in name else f"gpu_actors.{name}": value if isinstance(value, bool | int | float) else str(value)
        for name, value in fields.items()
        if value is not None
    }


class _Spans:
    def __init__(self, api: Any, tracer: Any) -> None:
        self._api = api
        self._tracer = tracer
        self._epoch = time.time_ns() - time.monotonic_ns()
        self._lock = threading.RLock()  # as in ChromeTrace
        self._spans: dict[tuple[str, object, str], Any] = {}

    def __call__(self, event: TraceEvent) -> None:
        with self._lock:
            if event.name.startswith("request."):
                self._request(event)
            elif event.name.startswith("compile."):
                self._compile(event)
            else:
                self._instant(event)

    def _request(self, event: TraceEvent) -> None:
        when = event.time + self._epoch
        fields = event.fields
        call = (str(fields["actor"]), fields["request"])
        match event.name:
            case "request.accepted":
                attributes = {"gpu_actors.actor": call[0], "gpu_actors.message": str(fields["message"])}
                self._spans[*call, "request"] = self._tracer.start_span(
                    "gpu_actors.request",
                    context=fields.get("context"),
                    attributes=attributes,
                    start_time=when,
                )
            case "request.compiling":
                self._child(call, "compile", fields, when)
            case "request.launched":
                self._end(call, "compile", when)
                self._child(call, "launch", fields, when)
            case "request.completed" | "request.failed":
                error = fields.get("error")
                for part in ("compile", "launch", "request"):
                    self._end(call, part, when, error)

    def _compile(self, event: TraceEvent) -> None:
        when = event.time + self._epoch
        call = ("nvrtc", f"{event.fields.get('variant')} {event.fields.get('digest', '')}")
        if event.name == "compile.started":
            attributes = {f"gpu_actors.{key}": str(value) for key, value in event.fields.items()}
            self._spans[*call, "nvrtc"] = self._tracer.start_span(
                "gpu_actors.nvrtc", attributes=attributes, start_time=when
            )
        else:
            self._end(call, "nvrtc", when, event.fields.get("error"))

    def _child(self, call: tuple[str, object], part: str, fields: Any, when: int) -> None:
        parent = self._spans.get((*call, "request"))
        if parent is not None:
            self._spans[*call, part] = self._tracer.start_span(
                f"gpu_actors.{part}",
                context=self._api.set_span_in_context(parent),
                attributes={f"gpu_actors.{name}": str(fields[name]) for name in ("key", "kernel") if name in fields},
                start_time=when,
            )

    def _end(self, call: tuple[str, object], part: str, when: int, error: object = None) -> None:
        span = self._spans.pop((*call, part), None)
        if span is None:
            return
        if error is not None:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, str(error)))
            if part in ("request", "nvrtc") and isinstance(error, BaseException):
                span.record_exception(error)
        span.end(end_time=when)

    def _instant(self, event: TraceEvent) -> None:
        when = event.time + self._epoch
        span = self._tracer.start_span(f"gpu_actors.{event.name}", start_time=when)
        for key, value in event.fields.items():
            span.set_attribute(f"gpu_actors.{key}", str(value))
        span.end(end_time=when)
