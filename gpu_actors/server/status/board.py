"""StatusBoard: reads the status of one context, or of the workers of a pool, for any number of viewers.

One thread reads the status twice a second, and at once after an event. Each viewer sends the latest snapshot; no viewer
has a queue. Actors call only `EventLog` here, for rare events, and a call takes microseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gpu_actors._version import __version__
from gpu_actors.server.http.readiness import Readiness, contexts_by_name, readiness_of, readiness_of_workers
from gpu_actors.server.status.clients import Clients, Times
from gpu_actors.server.status.event_log import EventLog
from gpu_actors.server.status.history import SLOT
from gpu_actors.server.status.reader import StatusReader, log_state
from gpu_actors.tracing import TraceEvent

if TYPE_CHECKING:
    from gpu_actors.handles.gpu_context import GpuContext
    from gpu_actors.server.http.traffic import Traffic

__all__ = ["StatusBoard", "Viewer"]

logger: logging.Logger = logging.getLogger("gpu_actors")

Numbers = Callable[[], Mapping[str, float]]
ReadReadiness = Callable[[], Mapping[str, Any]]

_PERIOD = 0.5
_LEAST = 0.05


class Viewer:
    """One reader of a board, on one event loop. woken: set when there is a new snapshot or the streams end."""

    def __init__(self) -> None:
        self.woken = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def wake(self) -> None:
        """Set ``woken``. Any thread may call it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.woken.set)


class StatusBoard:
    """Reads the status of a context, or of several workers, from `watch` to `close`, and makes snapshots as JSON.

    period: seconds between two snapshots while there are viewers; a loss or a restart causes one at once.
    max_viewers: the most streams at once. capacity: how many events are kept.
    draining: whether the context was draining in the latest snapshot. Each stream then ends after one snapshot.
    """

    def __init__(self, *, period: float = _PERIOD, max_viewers: int = 32, capacity: int = 500) -> None:
        self.max_viewers = max_viewers
        self.ending: bool = False
        self.draining: bool = False
        self.event_log: EventLog = EventLog(capacity)
        self._period = period
        self._numbers: list[Numbers] = []
        self._clients: Clients | None = None
        self._viewers: list[Viewer] = []
        self._lock = threading.Lock()
        self._due = threading.Event()
        self._closed = threading.Event()
        self._latest: bytes = b""
        self._number = 0
        self._thread: threading.Thread | None = None
        self._contexts: Mapping[str, GpuContext] = {}
        self._readers: dict[str, StatusReader] = {}
        self._verdict: ReadReadiness | None = None
        self._reading = threading.Lock()
        self._began = 0.0
        self._state = ""
        self._unwatch: list[Callable[[], None]] = []

    def watch(self, context: GpuContext | Mapping[str, GpuContext], verdict: ReadReadiness | None = None) -> None:
        """Read this context, or these workers by name, on a thread from now on.

        verdict: returns ready, state and reason, which the page shows first, and for workers the same of each under
        "workers"; `Probes.readiness` is an example. None: read ``health()`` of each context.
        """
        self.ending = False
        self._closed.clear()
        contexts = contexts_by_name(context)
        self._contexts, self._verdict = contexts, verdict
        self._readers = {name: StatusReader(one, self.event_log, name) for name, one in contexts.items()}
        self._began, self._state = time.time(), ""
        self._unwatch = [
            one._children.trace.watch(functools.partial(self._log_event, name)) for name, one in contexts.items()
        ]
        self._refresh()
        self._thread = threading.Thread(target=self._run, name="gpu-actors-status", daemon=True)
        self._thread.start()

    def show(self, numbers: Numbers) -> None:
        """Show the numbers that this returns, too. The board's thread calls it at each snapshot; it must not block."""
        self._numbers.append(numbers)

    def show_traffic(self, traffic: Traffic, timed: Times = MappingProxyType({})) -> None:
        """Show how clients are answered, before anything else, from the next `watch` on.

        timed: functions by name that return a histogram of seconds or None, called like the functions of `show`.
        """
        self._clients = Clients(traffic, timed)

    def end_streams(self) -> None:
        """End every viewer's stream, since a server waits for streams before it stops. Any thread may call it."""
        self.ending = True
        for viewer in list(self._viewers):
            viewer.wake()

    def close(self) -> None:
        """Stop reading. Blocks until the thread has ended, for at most the time of one snapshot."""
        self.end_streams()
        for unwatch in self._unwatch:
            unwatch()
        self._unwatch = []
        self._closed.set()
        self._due.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def latest(self) -> tuple[int, bytes]:
        """The number of the latest snapshot, and the snapshot as JSON."""
        with self._lock:
            return self._number, self._latest

    def snapshot(self) -> dict[str, Any]:
        """The state now, with the events that are kept. Reads the contexts, so no event loop's thread may call it."""
        return self._read() | {"events": self.event_log.since(0).items}

    @contextlib.contextmanager
    def viewer(self) -> Iterator[Viewer | None]:
        """Hold a place among the viewers while entered. Yields None if no place is left."""
        viewer = Viewer()
        with self._lock:
            room = len(self._viewers) < self.max_viewers
            if room:
                self._viewers.append(viewer)
        if not room:
            yield None
            return
        self._due.set()
        try:
            yield viewer
        finally:
            with self._lock:
                self._viewers.remove(viewer)

    def _log_event(self, worker: str, event: TraceEvent) -> None:
        self.event_log(event, worker)
        self._due.set()

    def _run(self) -> None:
        while True:
            # Without viewers only the histograms of the last minutes must be kept up to date.
            self._due.wait(self._period if self._viewers else SLOT)
            self._due.clear()
            if self._closed.is_set():
                return
            try:
                self._refresh()
            except Exception:
                logger.exception("the status of the context could not be read")
            self._closed.wait(_LEAST)

    def _refresh(self) -> None:
        snapshot = self._read()
        text = json.dumps(snapshot, separators=(",", ":")).encode()
        self.draining = snapshot["verdict"]["state"] == "draining"
        with self._lock:
            self._latest, self._number = text, self._number + 1
            viewers = list(self._viewers)
        for viewer in viewers:
            viewer.wake()

    def _read(self) -> dict[str, Any]:
        """The common fields, with the fields of the one context or with a list of "workers"."""
        with self._reading:
            readiness = self._read_readiness()
            common = {"version": __version__, "pid": os.getpid(), "time": time.time(), "since": self._began}
            common |= {
                "numbers": self._read_numbers(),
                "clients": self._clients.read() if self._clients is not None else None,
            }
            if "" in self._readers:
                return self._readers[""].read(readiness) | common
            workers = []
            for name, reader in self._readers.items():
                worker = reader.read(readiness["workers"][name])
                workers.append({"name": name, "restarts": worker["generation"] - 1} | worker)
            pool = {name: readiness[name] for name in Readiness._fields}
            if self._state not in ("", pool["state"]):
                fields = {"state": pool["state"], "before": self._state, "reason": pool["reason"] or None}
                log_state(self.event_log, fields)
            self._state = pool["state"]
            return common | {"verdict": pool, "workers": workers}

    def _read_readiness(self) -> Mapping[str, Any]:
        if self._verdict is not None:
            return self._verdict()
        workers = {name: readiness_of(context.health()) for name, context in self._contexts.items()}
        if "" in workers:
            return workers[""]._asdict()
        fields = {name: one._asdict() for name, one in workers.items()}
        return readiness_of_workers(workers)._asdict() | {"workers": fields}

    def _read_numbers(self) -> dict[str, float]:
        merged: dict[str, float] = {}
        for numbers in list(self._numbers):
            try:
                merged |= numbers()
            except Exception:
                logger.debug("numbers for the page could not be read", exc_info=True)
        return merged
