"""ChromeTrace: writes a trace that Perfetto and chrome://tracing open.

The format is the Trace Event Format's JSON object form. Requests, launches and compilations overlap freely, so each
is a pair of nestable async events ("b", "e"); restarts, losses and cache events are instants ("i"). One track group
for each actor.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gpu_actors.tracing.events import TraceEvent

__all__ = ["ChromeTrace"]


class ChromeTrace:
    """A listener for ``ContextOptions.on_event`` that collects events and writes them to a file.

    Use it as a context manager around the context, or call `write` after the context has closed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        # Re-entrant, for the garbage collector may end a waiting task while an event is recorded, which is an event.
        self._lock = threading.RLock()
        self._records: list[dict[str, Any]] = []
        self._tracks: dict[str, int] = {}
        self._open: dict[tuple[str, str], dict[str, Any]] = {}

    def __call__(self, event: TraceEvent) -> None:
        with self._lock:
            self._record(event)

    def write(self) -> None:
        """Write what was collected so far. What is still open is closed at the time of the last event."""
        with self._lock:
            # Threads take the time before they take the lock.
            records = sorted(self._records, key=lambda record: record["ts"])
            closing = [{**begin, "ph": "e", "ts": records[-1]["ts"]} for begin in list(self._open.values())]
            names = [
                {"ph": "M", "name": "thread_name", "pid": 1, "tid": track, "args": {"name": name}}
                for name, track in list(self._tracks.items())
            ]
            document = {"traceEvents": names + records + closing, "displayTimeUnit": "ms"}
        self.path.write_text(json.dumps(document))

    def __enter__(self) -> Self:
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
                pass  # answered in that very moment: nothing will end what began here
            case "request.compiling":
                self._begin(event, actor, "compile wait", request, "wait for kernel")
            case "request.launched":
                self._end(event, actor, "compile wait", request)
                self._begin(event, actor, "launch", request, "launch")
            case "request.completed" | "request.failed":
                for category in ("compile wait", "launch", "request"):
                    self._end(event, actor, category, request)
            case "compile.started":
                self._begin(event, actor, "compile", _compilation(event), f"compile {fields['variant']}")
            case "compile.completed":
                self._end(event, actor, "compile", _compilation(event))
            case _:
                self._records.append(self._event(event, actor, "instant", event.name) | {"ph": "i", "s": "p"})

    def _begin(self, event: TraceEvent, actor: str, category: str, identity: str, name: str) -> None:
        record = self._event(event, actor, category, name) | {"ph": "b", "id": f"{category}:{identity}"}
        self._open[category, identity] = record
        self._records.append(record)

    def _end(self, event: TraceEvent, actor: str, category: str, identity: str) -> None:
        begin = self._open.pop((category, identity), None)
        if begin is not None:
            self._records.append(self._event(event, actor, category, begin["name"]) | {"ph": "e", "id": begin["id"]})

    def _event(self, event: TraceEvent, actor: str, category: str, name: str) -> dict[str, Any]:
        track = self._tracks.setdefault(actor, len(self._tracks) + 1)
        args = {key: str(value) for key, value in event.fields.items() if value is not None}
        args["thread"] = event.thread
        return {"name": name, "cat": category, "pid": 1, "tid": track, "ts": event.time / 1000, "args": args}


def _compilation(event: TraceEvent) -> str:
    return f"{event.fields['variant']} {event.fields.get('digest', '')}".rstrip()
