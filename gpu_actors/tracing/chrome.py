"""ChromeTrace: writes a trace that Perfetto and chrome://tracing open.

The format is the Trace Event Format's JSON object form. Requests, launches and compilations overlap freely, so each
is a pair of nestable async events ("b", "e"); restarts, losses and cache events are instants ("i"). One track group
for each actor.
"""

from __future__ import annotations

import json
import os
import stat
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

import anyio
import anyio.to_thread

from gpu_actors.errors import InvalidRequest
from gpu_actors.loop import refuse_on_loop
from gpu_actors.tracing.events import TraceEvent

__all__ = ["ChromeTrace"]

Record = dict[str, Any]
MAX_SPANS = 50_000


class _Span(NamedTuple):
    """The record of a span that has ended (stop: microseconds) or of an instant (stop is None)."""

    begin: Record
    stop: float | None
    args: dict[str, str]


class ChromeTrace:
    """A listener for ``ContextOptions.on_event`` that collects events and writes them to a file.

    Use it as an async context manager around the context (a plain ``with`` in a program without a loop), or call
    `write` after the context has closed.

    max_spans: how many of the latest spans and instants are kept, some 1 KB each; a request has two or three. The file
        (``otherData.dropped``) and the attribute ``dropped`` count the older ones that were dropped.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_spans: int = MAX_SPANS) -> None:
        if max_spans < 1:
            raise InvalidRequest("max_spans", max_spans, "must be an int >= 1")
        self.path: Path = Path(path)
        self.dropped: int = 0
        # Re-entrant: the garbage collector may end a waiting task while an event is recorded, and that is an event too.
        self._lock = threading.RLock()
        self._spans: deque[_Span] = deque(maxlen=max_spans)
        self._tracks: dict[str, int] = {}
        self._open: dict[tuple[str, str], Record] = {}
        self._last = 0.0

    def __call__(self, event: TraceEvent) -> None:
        with self._lock:
            self._last = max(self._last, event.time / 1000)
            self._record(event)

    def write(self) -> None:
        """Write the events so far. Spans that are open end at the time of the last event.

        The file is written whole or left as it was. Blocks while the disk writes: on a loop, call it on a thread.
        """
        with self._lock:
            spans, begun, tracks = list(self._spans), list(self._open.values()), dict(self._tracks)
            last, dropped = self._last, self.dropped
        spans += [_Span(begin, last, begin["args"]) for begin in begun]
        _replace(self.path, _document(spans, tracks, dropped))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.write)

    def __enter__(self) -> Self:
        refuse_on_loop("with ChromeTrace()", "async with")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.write()

    def _record(self, event: TraceEvent) -> None:
        fields = event.fields
        actor = str(fields.get("actor", "nvrtc" if event.name.startswith(("compile", "cache")) else "context"))
        request = f"{actor}#{fields['request']}" if "request" in fields else ""
        match event.name:
            case "request.accepted":
                self._begin(event, actor, "request", request, str(fields["message"]))
            case "request.compiling" | "request.launched" if ("request", request) not in self._open:
                pass  # answered at that moment: no event will end this span
            case "request.compiling":
                self._begin(event, actor, "compile wait", request, "wait for kernel")
            case "request.launched":
                self._end(event, "compile wait", request)
                self._begin(event, actor, "launch", request, f"launch {fields.get('kernel', '')}".rstrip())
            case "request.completed" | "request.failed":
                for category in ("compile wait", "launch", "request"):
                    self._end(event, category, request)
            case "compile.started":
                self._begin(event, actor, "compile", _compilation(event), f"compile {fields['variant']}")
            case "compile.completed":
                self._end(event, "compile", _compilation(event))
            case _:
                instant = self._event(event, actor, "instant", event.name) | {"ph": "i", "s": "p"}
                self._keep(_Span(instant, None, instant["args"]))

    def _begin(self, event: TraceEvent, actor: str, category: str, identity: str, name: str) -> None:
        record = self._event(event, actor, category, name) | {"ph": "b", "id": f"{category}:{identity}"}
        self._open[category, identity] = record

    def _end(self, event: TraceEvent, category: str, identity: str) -> None:
        begin = self._open.pop((category, identity), None)
        if begin is not None:
            # Threads take the time before they take the lock.
            self._keep(_Span(begin, max(begin["ts"], event.time / 1000), _args(event)))

    def _keep(self, span: _Span) -> None:
        self.dropped += len(self._spans) == self._spans.maxlen
        self._spans.append(span)

    def _event(self, event: TraceEvent, actor: str, category: str, name: str) -> Record:
        track = self._tracks.setdefault(actor, len(self._tracks) + 1)
        return {"name": name, "cat": category, "pid": 1, "tid": track, "ts": event.time / 1000, "args": _args(event)}


def _args(event: TraceEvent) -> dict[str, str]:
    # As text: an error would keep its frames, and those their arrays.
    return {key: str(value) for key, value in event.fields.items() if value is not None} | {"thread": event.thread}


def _compilation(event: TraceEvent) -> str:
    return f"{event.fields['variant']} {event.fields.get('digest', '')}".rstrip()


# Writing


def _document(spans: list[_Span], tracks: dict[str, int], dropped: int) -> Iterator[str]:
    """The file, piece after piece: its whole text would be several times as large as the records."""
    head = json.dumps({"displayTimeUnit": "ms", "otherData": {"dropped": dropped}})
    yield f'{head[:-1]}, "traceEvents": ['
    between = ""
    for record in _records(spans, tracks):
        yield f"{between}\n{json.dumps(record)}"
        between = ","
    yield "\n]}\n"


def _records(spans: list[_Span], tracks: dict[str, int]) -> Iterator[Record]:
    for name, track in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": 1, "tid": track, "args": {"name": name}}
    order = [(span.begin["ts"], number, False) for number, span in enumerate(spans)]
    order += [(span.stop, number, True) for number, span in enumerate(spans) if span.stop is not None]
    order.sort(key=lambda entry: (entry[0], entry[2]))
    for time, number, ends in order:
        span = spans[number]
        yield {**span.begin, "ph": "e", "ts": time, "args": span.args} if ends else span.begin


def _replace(path: Path, pieces: Iterable[str]) -> None:
    """Write a file beside ``path`` and put it in its place. A device or a pipe is written as it is."""
    target = path.resolve()
    if target.exists() and not stat.S_ISREG(target.stat().st_mode):
        with target.open("w", encoding="utf-8") as opened:
            opened.writelines(pieces)
        return
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as opened:
            opened.writelines(pieces)
            _flush(opened)
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _flush(opened: IO[str]) -> None:
    opened.flush()
    os.fsync(opened.fileno())
