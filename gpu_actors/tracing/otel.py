"""OpenTelemetry spans of trace events, and of work that is not a request of a context.

A request's span is a child of the caller's current span: `current_context` is taken on the caller's thread and travels
with the call. A compilation has a span of its own, because any number of requests may wait for it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

from gpu_actors._version import __version__
from gpu_actors.tracing.events import Listener, TraceEvent
from gpu_actors.tracing.recorder import SpanListener

__all__ = ["current_context", "end_span", "make_current", "otel_listener", "provided", "start_span"]

_EPOCH = time.time_ns() - time.monotonic_ns()

_NAMES = {"request": "request", "compile wait": "compile", "launch": "launch", "step": "kv_step", "compile": "nvrtc"}
"""The names of spans by their category."""


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
    """The caller's OpenTelemetry context, which a call carries."""
    from opentelemetry import context

    return context.get_current()


def start_span(
    name: str,
    begin: int,
    *,
    parent: Any = None,
    links: Sequence[Any] = (),
    headers: Mapping[str, list[str]] | None = None,
    server: bool = False,
    fields: Mapping[str, Any],
) -> Any:
    """Start a span of work that is not a context's request, for programs with a tracer provider (`provided`).

    begin: monotonic nanoseconds.
    parent: a span. None: the current span, or the span in ``headers`` if none is current.
    fields: the attributes. Names with a dot are OpenTelemetry's; other names get the prefix "gpu_actors.".
    """
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
        start_time=_EPOCH + begin,
    )


def end_span(
    span: Any,
    end: int,
    name: str = "",
    fields: Mapping[str, Any] = MappingProxyType({}),
    error: object = None,
) -> None:
    """End a span. end: monotonic nanoseconds. name: a new name, or "" for the old one. error: why the work failed."""
    from opentelemetry import trace

    if name:
        span.update_name(name)
    span.set_attributes(_attributes(fields))
    if error is not None:
        span.set_status(trace.Status(trace.StatusCode.ERROR, str(error)))
    span.end(end_time=_EPOCH + end)


def make_current(span: Any) -> AbstractContextManager[Any]:
    """A context manager in which the span is current."""
    from opentelemetry import trace

    return trace.use_span(span, record_exception=False, set_status_on_exception=False)


def _attributes(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name if "." in name else f"gpu_actors.{name}": value if isinstance(value, bool | int | float) else str(value)
        for name, value in fields.items()
        if value is not None
    }


class _Spans(SpanListener):
    def __init__(self, api: Any, tracer: Any) -> None:
        super().__init__()
        self._api = api
        self._tracer = tracer

    def _begin(self, event: TraceEvent, actor: str, category: str, identity: str, name: str) -> None:
        fields, context = event.fields, None
        names: Iterable[str] = fields
        if category == "request":
            names, context = ("actor", "message"), fields.get("context")
        elif category != "compile":
            names = ("key", "kernel", "sequences", "layers")
            context = self._api.set_span_in_context(self._open["request", identity])
        self._open[category, identity] = self._start(_NAMES[category], event, names, context)

    def _end(self, event: TraceEvent, category: str, identity: str) -> None:
        span, error = self._open.pop((category, identity), None), event.fields.get("error")
        if span is None:
            return
        if category in ("request", "step", "compile") and isinstance(error, BaseException):
            span.record_exception(error)
        end_span(span, event.time, error=error)

    def _noted(self, event: TraceEvent, actor: str, category: str, identity: str) -> None:
        fields = {name: value for name, value in event.fields.items() if name not in ("actor", "request")}
        self._open[category, identity].add_event(event.name, _attributes(fields), _EPOCH + event.time)

    def _happened(self, event: TraceEvent, actor: str) -> None:
        end_span(self._start(event.name, event, event.fields), event.time)

    def _start(self, name: str, event: TraceEvent, names: Iterable[str], context: Any = None) -> Any:
        attributes = {f"gpu_actors.{name}": str(event.fields[name]) for name in names if name in event.fields}
        start = _EPOCH + event.time
        return self._tracer.start_span(f"gpu_actors.{name}", context=context, attributes=attributes, start_time=start)
