"""EventLog: the latest events of a context, as the page shows them. Its size is bounded."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from gpu_actors.tracing.events import LEVELS, TraceEvent
from gpu_actors.values import cut

__all__ = ["EventLog"]

_LONGEST = 400


class _Since(NamedTuple):
    """items: the events. newest: the number of the last event. missed: how many were dropped before they were read."""

    items: list[dict[str, Any]]
    newest: int
    missed: int


class EventLog:
    """The last ``capacity`` events, numbered from 1. Safe to use from any thread."""

    def __init__(self, capacity: int = 500) -> None:
        # Re-entrant: a finalizer that runs while an event is added may cause another event.
        self._lock = threading.RLock()
        self._items: deque[dict[str, Any]] = deque(maxlen=capacity)
        self._newest = 0
        # Numbers start again in each process, so a reader names the process too.
        self.boot: str = f"{time.time_ns():x}"

    def __call__(self, event: TraceEvent, worker: str = "") -> None:
        """Add an event of a trace. worker: the name of its worker, in a pool."""
        self.add(event.name, {"worker": worker, **event.fields} if worker else event.fields)

    def add(self, name: str, fields: Mapping[str, Any], level: str = "") -> None:
        """Add an event. level: "info", "warning" or "error"; by default the level of a trace's event of this name."""
        if not level:
            failed = name == "compile.completed" and fields.get("error") is not None
            number = logging.ERROR if failed else LEVELS.get(name, logging.INFO)
            level = {logging.ERROR: "error", logging.WARNING: "warning"}.get(number, "info")
        # Short texts are kept, since an error would keep its frames alive, and the frames their arrays.
        texts = {key: _short(value) for key, value in fields.items() if value is not None}
        with self._lock:
            self._newest += 1
            item = {"number": self._newest, "time": time.time(), "name": name, "level": level, "fields": texts}
            self._items.append(item)

    def since(self, number: int) -> _Since:
        """The events after this number."""
        with self._lock:
            number = min(max(number, 0), self._newest)
            items = [item for item in self._items if item["number"] > number]
            return _Since(items, self._newest, self._newest - number - len(items))


def _short(value: Any) -> str:
    if isinstance(value, BaseException):
        text = f"{type(value).__name__}: {value}"
    else:
        text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return cut(text, _LONGEST)
