"""ChromeTrace: collects a trace, and writes it into one file that Perfetto and chrome://tracing open.

The format is the Trace Event Format's JSON object form.
"""

from __future__ import annotations

import json
import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from gpu_actors.catching import undo_on_error
from gpu_actors.fields import integer
from gpu_actors.tracing.events import TraceEvent
from gpu_actors.tracing.recorder import Record, Recorder, row_names

__all__ = ["ChromeTrace", "replace_file"]

MAX_SPANS = 50_000
Row = tuple[int, int, str]


class _Span(NamedTuple):
    """The record of a span that has ended (stop: microseconds) or of an instant (stop is None)."""

    begin: Record
    stop: float | None
    args: dict[str, str]


class ChromeTrace(Recorder):
    """A listener for ``ContextOptions.on_event`` that collects events and writes them to a file.

    Use it as an async context manager around the context (a plain ``with`` in a program without a loop), or call
    `write` after the context has closed. While it is entered it collects the host spans of the process too. Use a
    `StreamedTrace` in a program that may be killed.

    max_spans: how many of the latest spans and instants are kept, about 1 KB each; a request has two or three. The file
        (``otherData.dropped``) and the attribute ``dropped`` count the older ones that were dropped.
    """

    def __init__(self, path: str | os.PathLike[str], *, max_spans: int = MAX_SPANS) -> None:
        integer("max_spans", max_spans, 1)
        super().__init__()
        self.path: Path = Path(path).absolute()  # a program may change its folder before it writes
        self.dropped: int = 0
        self._spans: deque[_Span] = deque(maxlen=max_spans)
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
            spans, open_spans = list(self._spans), list(self._open.values())
            rows = [(group, row, name) for group, names in self._rows.items() for (_, name), row in names.items()]
            last, dropped = self._last, self.dropped
        spans += [_Span(begin, last, begin["args"]) for begin in open_spans]
        replace_file(self.path, _document(spans, rows, dropped))

    def _finish(self) -> None:
        super()._finish()
        self.write()

    # Records, under the lock

    def _span_began(self, begin: Record) -> bool:
        return True

    def _span_ended(self, begin: Record, stop: float, args: dict[str, str]) -> None:
        self._keep(_Span(begin, stop, args))

    def _instant(self, record: Record) -> None:
        self._keep(_Span(record, None, record["args"]))

    def _span_replaced(self, former: Record, stop: float) -> None:
        """Drop the former span, since it never ends."""

    def _row_began(self, group: int, row: int, name: str) -> None:
        """Do nothing: rows are named when the file is written."""

    def _keep(self, span: _Span) -> None:
        self.dropped += len(self._spans) == self._spans.maxlen
        self._spans.append(span)


# Writing


def _document(spans: list[_Span], rows: list[Row], dropped: int) -> Iterator[str]:
    """Yield the file in pieces, since its whole text would be several times as large as the records."""
    head = json.dumps({"displayTimeUnit": "ms", "otherData": {"dropped": dropped}})
    yield f'{head[:-1]}, "traceEvents": ['
    between = ""
    for record in _records(spans, rows):
        yield f"{between}\n{json.dumps(record)}"
        between = ","
    yield "\n]}\n"


def _records(spans: list[_Span], rows: list[Row]) -> Iterator[Record]:
    for row in rows:
        yield from row_names(*row)
    order = [(span.begin["ts"], number, False) for number, span in enumerate(spans)]
    order += [(span.stop, number, True) for number, span in enumerate(spans) if span.stop is not None]
    order.sort(key=lambda entry: (entry[0], entry[2]))
    for time, number, ends in order:
        span = spans[number]
        yield {**span.begin, "ph": "e", "ts": time, "args": span.args} if ends else span.begin


def replace_file(path: Path, pieces: Iterable[str]) -> None:
    """Write a file beside ``path`` and move it there, so that ``path`` is complete or unchanged.

    A device or a pipe is written directly. Raises OSError.
    """
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):  # checked unresolved: /dev/stdout resolves to no file
        with path.open("w", encoding="utf-8") as opened:
            opened.writelines(pieces)
        return
    target = path.resolve()
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    with undo_on_error(lambda: part.unlink(missing_ok=True)):
        with part.open("w", encoding="utf-8") as opened:
            opened.writelines(pieces)
            opened.flush()
            os.fsync(opened.fileno())
        part.replace(target)
