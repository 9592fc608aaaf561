"""StatusBoard: looks at one context, for any number of viewers.

    one thread ── looks twice a second, and at once when something happens ──> the latest state, as bytes
    each viewer ── is woken, sends the latest state and the events since its last ones, waits

No viewer has a queue: one that reads slowly gets the latest state when it is back, and is told how many events it has
missed. Nothing here is called by an actor but the noting of rare events, which takes microseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gpu_actors._version import __version__
from gpu_actors.errors import GpuActorsError
from gpu_actors.runtime.cell import ActorCell
from gpu_actors.status.happenings import Happenings
from gpu_actors.status.history import SLOT, History

if TYPE_CHECKING:
    from gpu_actors.context import GpuContext

__all__ = ["StatusBoard", "Viewer"]

logger: logging.Logger = logging.getLogger("gpu_actors")

Numbers = Callable[[], Mapping[str, float]]

_PERIOD = 0.5
_LEAST = 0.05
_FOLDER_SECONDS = 10.0
"""Seconds between two looks at the cubin cache's folder."""
_COUNTS = ("submitted", "completed", "failed", "cancelled", "launched", "in_flight", "queued")


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
    """Looks at a context from `watch` to `close`, and gives its state as JSON.

    period: seconds between two looks while there are viewers; a loss and a restart are looked at when they happen.
    max_viewers: streams at once. capacity: events that are kept.
    """

    def __init__(self, *, period: float = _PERIOD, max_viewers: int = 32, capacity: int = 500) -> None:
        self.max_viewers = max_viewers
        self.ending: bool = False
        self.happenings: Happenings = Happenings(capacity)
        self._period = period
        self._numbers: list[Numbers] = []
        self._viewers: list[Viewer] = []
        self._lock = threading.Lock()
        self._turn = threading.Event()
        self._closed = threading.Event()
        self._latest: bytes = b""
        self._number = 0
        self._draining = False
        self._thread: threading.Thread | None = None
        self._looker: _Looker | None = None
        self._unwatch: Callable[[], None] | None = None

    def watch(self, context: GpuContext, verdict: Callable[[], Mapping[str, Any]] | None = None) -> None:
        """Look at this context from now on, from a thread.

        verdict: gives ready, state and reason as the page shows them first. None: those of ``context.health()``.
        """
        self.ending = False
        self._closed.clear()
        self._looker = _Looker(context, verdict, self.happenings, self._numbers)
        self._unwatch = context._children.trace.watch(self._noted)
        self._look()
        self._thread = threading.Thread(target=self._run, name="gpu-actors-status", daemon=True)
        self._thread.start()

    def show(self, numbers: Numbers) -> None:
        """Show these numbers by their names too. Called on the board's thread at each look, so it must not block."""
        self._numbers.append(numbers)

    def end_streams(self) -> None:
        """Have every viewer's stream end, as a server waits for them before it stops. From any thread."""
        self.ending = True
        for viewer in list(self._viewers):
            viewer.wake()

    def close(self) -> None:
        """Look no more. Blocks until the thread has ended, which takes no longer than one look."""
        self.end_streams()
        if self._unwatch is not None:
            self._unwatch()
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
        assert self._looker is not None
        found = self._looker.look()
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

    def _noted(self, event: Any) -> None:
        self.happenings(event)
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
        assert self._looker is not None
        found = self._looker.look()
        text = json.dumps(found, separators=(",", ":")).encode()
        self._draining = found["verdict"]["state"] == "draining"
        with self._lock:
            self._latest, self._number = text, self._number + 1
            viewers = list(self._viewers)
        for viewer in viewers:
            viewer.wake()


class _Looker:
    """Takes looks at one context, and notes what has changed between two. Several threads may look in turn."""

    def __init__(
        self,
        context: GpuContext,
        verdict: Callable[[], Mapping[str, Any]] | None,
        happenings: Happenings,
        numbers: list[Numbers],
    ) -> None:
        self._context = context
        self._verdict = verdict
        self._happenings = happenings
        self._numbers = numbers
        self._lock = threading.Lock()
        self._history = History(context)
        self._began = time.time()
        self._state = ""
        self._errors: dict[str, dict[str, int]] = {}
        self._restarts: dict[str, int] = {}
        self._folder: tuple[float, dict[str, int]] = (-_FOLDER_SECONDS, {})

    def look(self) -> dict[str, Any]:
        with self._lock:
            return self._look()

    def _look(self) -> dict[str, Any]:
        context = self._context
        children, health, stats = context._children, context.health(), context.stats()
        told: Mapping[str, Any]
        told = {"ready": health.ready, "state": health.state, "reason": health.reason}
        if self._verdict is not None:
            told = self._verdict()
        verdict = {name: told[name] for name in ("ready", "state", "reason")}
        now = children.clock.now()
        actors = []
        for name, cell in children.cells.items():
            counts = stats[name]
            busy = getattr(cell, "busy_since", None)
            actors.append(
                {
                    "name": name,
                    "vital": cell.actor_type.vital,
                    "state": health.actors[name],
                    "restarts": cell.restarts,
                    "failures": health.failures[name],
                    "capacity": cell.mailbox.capacity,
                    "max_in_flight": cell.mailbox.max_in_flight,
                    "busy_seconds": None if busy is None else round(max(0.0, now - busy), 3),
                    "requests_per_launch": round(counts.requests_per_launch, 2),
                    "errors": dict(counts.errors),
                }
                | {field: getattr(counts, field) for field in _COUNTS}
            )
        self._note_changes(actors, verdict)
        device = health.device
        return {
            "version": __version__,
            "pid": os.getpid(),
            "time": time.time(),
            "since": self._began,
            "verdict": verdict,
            "device": {"kind": device.kind, "name": device.name, "arch": device.arch, "memory": device.memory},
            "runs_kernels": device.runs_kernels,
            "generation": health.generation,
            "oldest_launch": health.oldest_launch,
            "actors": actors,
            "history": self._history.look(),
            "kernels": self._kernels(),
            "cubins": self._cubins(),
            "caches": self._caches(),
            "numbers": self._counted(),
        }

    def _note_changes(self, actors: list[dict[str, Any]], verdict: Mapping[str, Any]) -> None:
        first = not self._state
        if verdict["state"] != self._state:
            if not first:
                grave = verdict["state"] in ("failed", "stalled")
                level = "error" if grave else "info" if verdict["state"] == "ready" else "warning"
                fields = {"state": verdict["state"], "before": self._state, "reason": verdict["reason"] or None}
                self._happenings.note("state.changed", fields, level)
            self._state = verdict["state"]
        for actor in actors:
            name, errors, restarts = actor["name"], actor["errors"], actor["restarts"]
            here = isinstance(self._context._children.cells[name], ActorCell)
            if restarts > self._restarts.get(name, 0) and not here:
                # The events of an isolated context's actors stay in its process.
                self._happenings.note("actor.restarted", {"actor": name, "restarts": restarts})
            self._restarts[name] = restarts
            before = self._errors.get(name, {})
            for error, count in errors.items():
                more = count - before.get(error, 0)
                if more > 0 and not first:
                    self._happenings.note("requests.failed", {"actor": name, "error": error, "count": more})
            self._errors[name] = errors

    def _kernels(self) -> list[dict[str, Any]] | None:
        """The kernels that requests have asked for, the latest first; None where they are not known now."""
        try:
            uses = self._context._children.cells["nvrtc"].shared.uses()
        except GpuActorsError:
            return None
        found = []
        for use in reversed(uses):
            parts = list(use.resources.values())
            found.append(
                {
                    "name": use.name,
                    "arch": use.arch,
                    "digest": use.digest,
                    "source": use.source,
                    "asked": use.asked,
                    "macros": {name: str(value) for name, value in use.macros.items()},
                    "registers": max((part.registers for part in parts), default=None),
                    "spill_bytes": sum(part.spill_bytes for part in parts) if parts else None,
                    "shared_bytes": max((part.shared_bytes for part in parts), default=None),
                }
            )
        return found

    def _cubins(self) -> dict[str, int]:
        read, found = self._folder
        if time.monotonic() - read >= _FOLDER_SECONDS:
            with contextlib.suppress(GpuActorsError):
                stats = self._context.nvrtc.cache_stats()
                names = ("hits", "misses", "compiles", "corrupt", "evicted", "entries", "bytes")
                found = {name: getattr(stats, name) for name in names}
            self._folder = (time.monotonic(), found)
        return found

    def _caches(self) -> list[dict[str, Any]] | None:
        try:
            looks = self._context._children.cells["kv_cache"].shared.look()
        except GpuActorsError:
            return None
        return [
            {
                "number": look.number,
                "page_size": look.page_size,
                "kv_heads": look.kv_heads,
                "head_dim": look.head_dim,
                "dtype": look.dtype,
                "pages": look.stats.blocks,
                "free": look.stats.free_blocks - look.stats.prefix_blocks,
                "kept": look.stats.prefix_blocks,
                "shared": look.stats.shared_blocks,
                "sequences": look.stats.sequences,
                "map": look.pages._asdict(),
            }
            for look in looks
        ]

    def _counted(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for numbers in list(self._numbers):
            try:
                found |= numbers()
            except Exception:
                logger.debug("numbers for the page could not be read", exc_info=True)
        return found
