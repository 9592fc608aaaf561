"""Happenings: the latest events of a context, as a page shows them. Bounded, whatever happens."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from gpu_actors.tracing import TraceEvent

__all__ = ["Happenings"]

_LONGEST = 400
_GRAVE = ("actor.failed", "context.lost", "requests.failed")
_WARNINGS = ("actor.restarted", "cache.corrupt", "state.changed")


class _Since(NamedTuple):
    """newest: the number of the last event. missed: events that were dropped before they were asked for."""

    items: list[dict[str, Any]]
    newest: int
    missed: int


class Happenings:
    """The last ``capacity`` events, numbered from 1. Safe to use from any thread."""

    def __init__(self, capacity: int = 500) -> None:
        # Re-entrant: a finalizer that runs while an event is noted may cause another one.
        self._lock = threading.RLock()
        self._items: deque[dict[str, Any]] = deque(maxlen=capacity)
        self._newest = 0
        # Numbers begin anew in each process, so a reader names the process too.
        self.boot: str = f"{time.time_ns():x}"

    def __call__(self, event: TraceEvent, worker: str = "") -> None:
        """Note an event of a trace. worker: whose it is, in a pool."""
        self.note(event.name, {"worker": worker, **event.fields} if worker else event.fields)

    def note(self, name: str, fields: Mapping[str, Any], level: str = "") -> None:
        """Note an event. level: "info", "warning" or "error"; by default what the name says."""
        failed = name == "compile.completed" and fields.get("error") is not None
        if not level:
            level = "error" if failed or name in _GRAVE else "warning" if name in _WARNINGS else "info"
        # As text, and short: an error keeps its frames, and those their arrays.
        shown = {key: _short(value) for key, value in fields.items() if value is not None}
        with self._lock:
            self._newest += 1
            item = {"number": self._newest, "time": time.time(), "name": name, "level": level, "fields": shown}
            self._items.append(item)

    def since(self, number: int) -> _Since:
        """The events after that number."""
        with self._lock:
            number = min(max(number, 0), self._newest)
            items = [item for item in self._items if item["number"] > number]
            return _Since(items, self._newest, self._newest - number - len(items))


def _short(value: Any) -> str:
    if isinstance(value, BaseException):
        text = f"{type(value).__name__}: {value}"
    else:
        text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
