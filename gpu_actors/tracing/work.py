"""Work: tasks over many awaits without a thread of their own: a client's request, a text, a step of many texts.

with working("step", links=texts, fields={"rows": 12}):
    await cache.attend(...)  # requests of a context lie under it

Work becomes a span in open trace files and in OpenTelemetry. Without both it costs a microsecond.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from gpu_actors.tracing import host
from gpu_actors.tracing.otel import current_context, end_span, make_current, provided, start_span

__all__ = ["Work", "active", "begin_work", "caller", "under", "working"]

Fields = Mapping[str, Any]

_current: ContextVar[Work | None] = ContextVar("gpu_actors_work", default=None)
_numbers = itertools.count(1)
_NO_FIELDS: Fields = MappingProxyType({})
_NOTHING: AbstractContextManager[None] = nullcontext()


class Work:
    """Work that has begun.

    label: its name in other records.
    span: the OpenTelemetry span, or None.
    """

    __slots__ = ("_begin", "_fields", "_kind", "_name", "label", "span")

    def __init__(self, kind: str, name: str, label: str, begin: int, fields: Fields, span: Any) -> None:
        self.label = label
        self.span = span
        self._kind, self._name, self._begin, self._fields = kind, name, begin, fields

    @property
    def trace_id(self) -> str:
        """The id of OpenTelemetry's trace, 32 hexadecimal digits. Empty if there is none."""
        number = 0 if self.span is None else self.span.get_span_context().trace_id
        return f"{number:032x}" if number else ""

    def part(self, name: str, begin: float, end: float, fields: Fields = _NO_FIELDS) -> None:
        """Record a part of the work that has ended. begin, end: ``time.monotonic()`` seconds."""
        times = _nanoseconds(begin), _nanoseconds(end)
        if self.span is not None:
            with host.guarded(name):
                span = start_span(f"gpu_actors.{name}", times[0], parent=self.span, fields=fields)
                end_span(span, times[1])
        _hand_out(self._kind, name, *times, {**fields, "under": self.label})

    def end(self, fields: Fields = _NO_FIELDS, *, name: str = "", error: BaseException | str | None = None) -> None:
        """End the work. name: a new name. error: why it failed."""
        now = time.monotonic_ns()
        if self.span is not None:
            with host.guarded(self._name):
                end_span(self.span, now, name, fields, error)
        failed = {} if error is None else {"error": error if isinstance(error, str) else type(error).__name__}
        _hand_out(self._kind, name or self._name, self._begin, now, {**self._fields, **fields, **failed})


def active() -> bool:
    """Whether an open trace file or OpenTelemetry records work."""
    return host.active() or provided()


def begin_work(
    kind: str,
    name: str,
    *,
    label: str = "",
    started: float | None = None,
    parent: Work | None = None,
    links: Sequence[Work] = (),
    headers: Mapping[str, list[str]] = MappingProxyType({}),
    server: bool = False,
    fields: Fields = _NO_FIELDS,
) -> Work | None:
    """Begin work. Returns None if nothing records it.

    kind: names its row in files.
    label: by default the name and a number.
    started: when it began, ``time.monotonic()`` seconds. By default now.
    parent: by default the current work.
    links: other work that this work serves.
    headers: a client's headers, by lower-case name. Their traceparent is the parent if no span is current.
    server: whether this work answers a client.
    """
    if not active():
        return None
    begin = time.monotonic_ns() if started is None else _nanoseconds(started)
    label = label or f"{name} {next(_numbers)}"
    enclosing = parent or _current.get()
    all_fields = {**fields, "under": enclosing.label} if enclosing is not None else dict(fields)
    if links:
        all_fields["links"] = ", ".join(one.label for one in links)
    span = None
    if provided():
        with host.guarded(name):
            span = start_span(
                name if server else f"gpu_actors.{name}",
                begin,
                parent=None if parent is None else parent.span,
                links=[one.span for one in links if one.span is not None],
                headers=headers,
                server=server,
                fields=fields,
            )
    return Work(kind, name, label, begin, {"label": label, **all_fields}, span)


def caller(carry_context: bool) -> dict[str, Any]:
    """The fields of a request's event about its caller.

    context: OpenTelemetry's context, if ``carry_context``. under: the label of the caller's work.
    """
    work = _current.get()
    context = current_context() if carry_context else None
    return {"context": context, "under": None if work is None else work.label}


def under(work: Work | None) -> AbstractContextManager[None]:
    """A context manager in which this work is current, for OpenTelemetry too. None changes nothing."""
    return _NOTHING if work is None else _under(work)


@contextmanager
def working(kind: str, *, links: Sequence[Work], fields: Fields) -> Iterator[None]:
    """A context manager for work that serves all of ``links``: a child of the first recorded one, linked to all."""
    first = next((one for one in links if one.span is not None and one.span.is_recording()), None)
    parent = first or next(iter(links), None)
    work = begin_work(f"{kind}s", kind, parent=parent, links=links, fields=fields) if links else None
    try:
        with under(work):
            yield
    except BaseException as error:
        if work is not None:
            work.end(error=error)
        raise
    if work is not None:
        work.end()


@contextmanager
def _under(work: Work) -> Iterator[None]:
    token = _current.set(work)
    try:
        with nullcontext() if work.span is None else make_current(work.span):
            yield
    finally:
        _current.reset(token)


def _hand_out(kind: str, name: str, begin: int, end: int, fields: Fields) -> None:
    if host.active():
        host.hand_out(host.HostSpan(name, begin, end, 0, kind, dict(fields)))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
