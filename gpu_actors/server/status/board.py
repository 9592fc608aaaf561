"""StatusBoard: looks at one context, or at the workers of a pool, for any number of viewers.

    one thread ── looks twice a second, and at once when something happens ──> the latest state, as bytes
    each viewer ── is woken, sends the latest state and the events since its last ones, waits

No viewer has a queue: one that reads slowly gets the latest state when it is back, and is told how many events it has
missed. Nothing here is called by an actor but the noting of rare events, which takes microseconds.
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
from gpu_actors.fields import expect
from gpu_actors.server.http.readiness import Readiness, readiness_of, readiness_of_workers
from gpu_actors.server.status.clients import Clients, Times
from gpu_actors.server.status.event_log import Happenings
from gpu_actors.server.status.history import SLOT
from gpu_actors.server.status.reader import Looker, note_state
from gpu_actors.tracing import TraceEvent

if TYPE_CHECKING:
    from gpu_actors.context import GpuContext
    from gpu_actors.server.http.traffic import Traffic

__all__ = ["StatusBoard", "Viewer"]

logger: logging.Logger = logging.getLogger("gpu_actors")

Numbers = Callable[[], Mapping[str, float]]
Tell = Callable[[], Mapping[str, Any]]

_PERIOD = 0.5
_LEAST = 0.05


class Viewer:
    """One reader of a board, on one event loop. woken: set when there is something new."""

    def __init__(self) -> None:
        self.woken = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def wake(self) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.woken.set)


class StatusBoard:
    """Looks at a context, or at several workers, from `watch` to `close`, and gives their state as JSON.

    period: seconds between two looks while there are viewers; a loss and a restart are looked at when they happen.
    max_viewers: streams at once. capacity: events that are kept.
    """

    def __init__(self, *, period: float = _PERIOD, max_viewers: int = 32, capacity: int = 500) -> None:
        self.max_viewers = max_viewers
        self.ending: bool = False
        self.happenings: Happenings = Happenings(capacity)
        self._period = period
        self._numbers: list[Numbers] = []
        self._clients: Clients | None = None
        self._viewers: list[Viewer] = []
        self._lock = threading.Lock()
        self._turn = threading.Event()
        self._closed = threading.Event()
        self._latest: bytes = b""
        self._number = 0
        self._draining = False
        self._thread: threading.Thread | None = None
        self._looks: _Looks | None = None
        self._unwatch: list[Callable[[], None]] = []

    def watch(self, context: GpuContext | Mapping[str, GpuContext], verdict: Tell | None = None) -> None:
        """Look at this context, or at these workers by name, from now on, from a thread.

        verdict: gives ready, state and reason as the page shows them first, and for workers the same of each under
        "workers"; `Probes.readiness` is one. None: what ``health()`` of each context says.
        """
        self.ending = False
        self._closed.clear()
        contexts: Mapping[str, GpuContext] = context if isinstance(context, Mapping) else {"": context}
        named = bool(contexts) and not (isinstance(context, Mapping) and "" in contexts)
        expect(named, "context", context, "must be a context, or at least one worker by name")
        self._looks = _Looks(contexts, verdict, self.happenings, self._numbers, self._clients)
        self._unwatch = [
            one._children.trace.watch(functools.partial(self._noted, name)) for name, one in contexts.items()
        ]
        self._look()
        self._thread = threading.Thread(target=self._run, name="gpu-actors-status", daemon=True)
        self._thread.start()

    def show(self, numbers: Numbers) -> None:
        """Show these numbers by their names too. Called on the board's thread at each look, so it must not block."""
        self._numbers.append(numbers)

    def show_traffic(self, traffic: Traffic, timed: Times = MappingProxyType({})) -> None:
        """Show how clients are answered, before anything else, from the next `watch` on.

        timed: functions that give histograms of seconds by name, or None; called as those of `show` are.
        """
        self._clients = Clients(traffic, timed)

    def end_streams(self) -> None:
        """Have every viewer's stream end, as a server waits for them before it stops. From any thread."""
        self.ending = True
        for viewer in list(self._viewers):
            viewer.wake()

    def close(self) -> None:
        """Look no more. Blocks until the thread has ended, which takes no longer than one look."""
        self.end_streams()
        for unwatch in self._unwatch:
            unwatch()
        self._unwatch = []
        self._closed.set()
        self._turn.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def draining(self) -> bool:
        """Whether the context was leaving at the latest look: streams then end after each state."""
        return self._draining

    @property
    def latest(self) -> tuple[int, bytes]:
        """The number of the latest look, and the state as JSON."""
        with self._lock:
            return self._number, self._latest

    def snapshot(self) -> dict[str, Any]:
        """The state now, with the events that are kept. Takes a look: not for a loop's thread."""
        assert self._looks is not None
        found = self._looks.look()
        return found | {"events": self.happenings.since(0).items}

    @contextlib.contextmanager
    def viewer(self) -> Iterator[Viewer | None]:
        """A place among the viewers, or None where there is none left."""
        viewer = Viewer()
        with self._lock:
            room = len(self._viewers) < self.max_viewers
            if room:
                self._viewers.append(viewer)
        if not room:
            yield None
            return
        self._turn.set()
        try:
            yield viewer
        finally:
            with self._lock:
                self._viewers.remove(viewer)

    def _noted(self, worker: str, event: TraceEvent) -> None:
        self.happenings(event, worker)
        self._turn.set()

    def _run(self) -> None:
        while True:
            # Without viewers only the histograms of the last minutes are kept up.
            self._turn.wait(self._period if self._viewers else SLOT)
            self._turn.clear()
            if self._closed.is_set():
                return
            try:
                self._look()
            except Exception:
                logger.exception("the state of the context could not be looked at")
            self._closed.wait(_LEAST)

    def _look(self) -> None:
        assert self._looks is not None
        found = self._looks.look()
        text = json.dumps(found, separators=(",", ":")).encode()
        self._draining = found["verdict"]["state"] == "draining"
        with self._lock:
            self._latest, self._number = text, self._number + 1
            viewers = list(self._viewers)
        for viewer in viewers:
            viewer.wake()


class _Looks:
    """The state of all contexts. Several threads may look in turn."""

    def __init__(
        self,
        contexts: Mapping[str, GpuContext],
        verdict: Tell | None,
        happenings: Happenings,
        numbers: list[Numbers],
        clients: Clients | None,
    ) -> None:
        self._contexts = contexts
        self._verdict = verdict
        self._happenings = happenings
        self._numbers = numbers
        self._clients = clients
        self._lookers = {name: Looker(context, happenings, name) for name, context in contexts.items()}
        self._lock = threading.Lock()
        self._began = time.time()
        self._state = ""

    def look(self) -> dict[str, Any]:
        """What all contexts have in common, and beside it the one context, or "workers": one after the other."""
        with self._lock:
            told = self._told()
            common = {"version": __version__, "pid": os.getpid(), "time": time.time(), "since": self._began}
            common |= {
                "numbers": self._counted(),
                "clients": self._clients.look() if self._clients is not None else None,
            }
            if "" in self._lookers:
                return self._lookers[""].look(told) | common
            workers = []
            for name, looker in self._lookers.items():
                found = looker.look(told["workers"][name])
                workers.append({"name": name, "restarts": found["generation"] - 1} | found)
            verdict = {name: told[name] for name in Readiness._fields}
            if self._state not in ("", verdict["state"]):
                fields = {"state": verdict["state"], "before": self._state, "reason": verdict["reason"] or None}
                note_state(self._happenings, fields)
            self._state = verdict["state"]
            return common | {"verdict": verdict, "workers": workers}

    def _told(self) -> Mapping[str, Any]:
        if self._verdict is not None:
            return self._verdict()
        found = {name: readiness_of(context.health()) for name, context in self._contexts.items()}
        if "" in found:
            return found[""]._asdict()
        workers = {name: one._asdict() for name, one in found.items()}
        return readiness_of_workers(found)._asdict() | {"workers": workers}

    def _counted(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for numbers in list(self._numbers):
            try:
                found |= numbers()
            except Exception:
                logger.debug("numbers for the page could not be read", exc_info=True)
        return found
