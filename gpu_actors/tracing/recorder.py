"""Pairs trace events to spans, and makes records of the Trace Event Format from them, for files of any kind.

docs/tracing.md lists the rows. Requests, launches and compilations of an actor overlap freely, so each is a
pair of nestable async events ("b", "e"), as is work without a thread of its own. Restarts, losses and cache events
are instants ("i"), and the work of threads is complete events ("X"), which nest.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any, Self

import anyio
import anyio.to_thread

from gpu_actors.process import refuse_on_loop
from gpu_actors.tracing.events import TraceEvent
from gpu_actors.tracing.host import HostSpan, add_sink, remove_sink

__all__ = ["Record", "Recorder", "SpanListener", "row_names"]

Record = dict[str, Any]

ACTORS, THREADS, SERVICE = 1, 2, 3
_MOST_THREADS = 1000
_GROUPS = {ACTORS: "actors", THREADS: "threads", SERVICE: "service"}


class SpanListener(ABC):
    """A listener that pairs events to spans. Any thread may call it. Subclasses keep open spans in ``_open``."""

    def __init__(self) -> None:
        # Re-entrant: the garbage collector may end a waiting task while an event is recorded, which is an event too.
        self._lock = threading.RLock()
        self._open: dict[tuple[str, str], Any] = {}

    def __call__(self, event: TraceEvent) -> None:
        with self._lock:
            self._record(event)

    def _record(self, event: TraceEvent) -> None:
        fields = event.fields
        actor = str(fields.get("actor", "nvrtc" if event.name.startswith(("compile", "cache")) else "context"))
        request = f"{actor}#{fields['request']}" if "request" in fields else ""
        match event.name:
            case "request.accepted":
                self._begin(event, actor, "request", request, str(fields["message"]))
            case "request.compiling" | "request.launched" if ("request", request) not in self._open:
                pass  # answered meanwhile: no event would end this span
            case "request.compiling":
                self._begin(event, actor, "compile wait", request, "wait for kernel")
            case "request.launched":
                self._end(event, "compile wait", request)
                self._begin(event, actor, "launch", request, f"launch {fields.get('kernel', '')}".rstrip())
            case "request.completed" | "request.failed":
                for category in ("compile wait", "launch", "request"):
                    self._end(event, category, request)
            case "step.begun" if ("request", request) in self._open:
                self._begin(event, actor, "step", request, f"step of {fields['layers']} layers")
            case "step.layer" | "step.replayed" if ("step", request) in self._open:
                self._noted(event, actor, "step", request)
            case "step.ended":
                self._end(event, "step", request)
            case "compile.started":
                self._begin(event, actor, "compile", _compilation(event), f"compile {fields['variant']}")
            case "compile.completed":
                self._end(event, "compile", _compilation(event))
            case _:
                self._happened(event, actor)

    # For subclasses. Called under the lock.

    @abstractmethod
    def _begin(self, event: TraceEvent, actor: str, category: str, identity: str, name: str) -> None:
        """Begin a span. category: "request", "compile wait", "launch", "step" or "compile"."""

    @abstractmethod
    def _end(self, event: TraceEvent, category: str, identity: str) -> None:
        """End a span. Ignored if the span has not begun."""

    @abstractmethod
    def _happened(self, event: TraceEvent, actor: str) -> None:
        """Take an event that neither begins nor ends a span."""

    def _noted(self, event: TraceEvent, actor: str, category: str, identity: str) -> None:
        """Take an event of an open span."""
        self._happened(event, actor)


class Recorder(SpanListener):
    """A listener for ``ContextOptions.on_event`` and a sink of host spans. Enter it around a context."""

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[int, dict[tuple[int, str], int]] = {group: {} for group in _GROUPS}
        self._works = 0

    def host_span(self, span: HostSpan) -> None:
        """Record a host span. `gpu_actors.tracing.host_span` calls it."""
        with self._lock:
            if not span.thread:
                self._work(span)
                return
            key, threads = (span.thread, span.thread_name), self._rows[THREADS]
            if key not in threads and len(threads) >= _MOST_THREADS:
                key = (0, "other threads")
            self._instant(
                {
                    "name": span.name,
                    "cat": "host",
                    "ph": "X",
                    "pid": THREADS,
                    "tid": self._row(THREADS, key[1], key[0]),
                    "ts": span.begin / 1000,
                    "dur": (span.end - span.begin) / 1000,
                    "args": {name: str(value) for name, value in span.fields.items()},
                }
            )

    def _work(self, span: HostSpan) -> None:
        row = self._row(SERVICE, span.thread_name)
        self._works += 1
        begin: Record = {"name": span.name, "cat": span.thread_name, "pid": SERVICE, "tid": row, "ph": "b"}
        args = {name: str(value) for name, value in span.fields.items() if value is not None}
        begin |= {"id": f"{span.thread_name}:{self._works}", "ts": span.begin / 1000, "args": args}
        if self._span_began(begin):
            self._span_ended(begin, span.end / 1000, args)

    def _row(self, group: int, name: str, number: int = 0) -> int:
        """The row of a group for an actor, a thread (with its number) or a kind of work."""
        rows = self._rows[group]
        row = rows.get((number, name))
        if row is None:
            row = rows[number, name] = len(rows) + 1
            self._row_began(group, row, name)
        return row

    def __enter__(self) -> Self:
        refuse_on_loop(f"with {type(self).__name__}()", "async with")
        self._start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._finish()

    async def __aenter__(self) -> Self:
        self._start()
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._finish)

    def _start(self) -> None:
        """Start collecting."""
        add_sink(self.host_span)

    def _finish(self) -> None:
        """Stop collecting. A subclass also ends its file, which may block while the disk writes."""
        remove_sink(self.host_span)

    # For subclasses. Called under the lock.

    @abstractmethod
    def _span_began(self, begin: Record) -> bool:
        """Begin a span. Returns False if it is not recorded: `_span_ended` is then not called for it."""

    @abstractmethod
    def _span_ended(self, begin: Record, stop: float, args: dict[str, str]) -> None:
        """End a span. stop: microseconds."""

    @abstractmethod
    def _instant(self, record: Record) -> None:
        """Take a record that is complete without a second one."""

    @abstractmethod
    def _row_began(self, group: int, row: int, name: str) -> None:
        """Called before the first record of a row."""

    def _happened(self, event: TraceEvent, actor: str) -> None:
        self._instant(self._event(event, actor, "instant", event.name) | {"ph": "i", "s": "p"})

    def _begin(self, event: TraceEvent, actor: str, category: str, identity: str, name: str) -> None:
        record = self._event(event, actor, category, name) | {"ph": "b", "id": f"{category}:{identity}"}
        former = self._open.pop((category, identity), None)
        if former is not None:
            self._span_replaced(former, record["ts"])
        if self._span_began(record):
            self._open[category, identity] = record

    @abstractmethod
    def _span_replaced(self, former: Record, stop: float) -> None:
        """Called when another span of the same name begins, as when two threads compile the same kernel."""

    def _end(self, event: TraceEvent, category: str, identity: str) -> None:
        begin = self._open.pop((category, identity), None)
        if begin is not None:
            # Threads take the time before the lock, so an end may be recorded with an earlier time than its beginning.
            self._span_ended(begin, max(begin["ts"], event.time / 1000), _args(event))

    def _event(self, event: TraceEvent, actor: str, category: str, name: str) -> Record:
        row = self._row(ACTORS, actor)
        return {"name": name, "cat": category, "pid": ACTORS, "tid": row, "ts": event.time / 1000, "args": _args(event)}


def row_names(group: int, row: int, name: str) -> list[Record]:
    """The records that name a row and, with the first row of a group, the group."""
    records = [{"ph": "M", "name": "thread_name", "pid": group, "tid": row, "args": {"name": name}}]
    if row == 1:
        records.insert(0, {"ph": "M", "name": "process_name", "pid": group, "tid": 0, "args": {"name": _GROUPS[group]}})
    return records


def _args(event: TraceEvent) -> dict[str, str]:
    # Fields become texts, since an error would keep its frames, and the frames their arrays.
    fields = {key: str(value) for key, value in event.fields.items() if value is not None and key != "context"}
    return fields | {"thread": event.thread}


def _compilation(event: TraceEvent) -> str:
    return f"{event.fields['variant']} {event.fields.get('digest', '')}".rstrip()
