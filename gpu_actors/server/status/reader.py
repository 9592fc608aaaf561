"""StatusReader: the status of one context, as plain data."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gpu_actors.errors import DeadlineExceeded, GpuActorsError
from gpu_actors.runtime.cell import ActorCell
from gpu_actors.server.http.readiness import Readiness
from gpu_actors.server.status.event_log import EventLog
from gpu_actors.server.status.history import History

if TYPE_CHECKING:
    from gpu_actors.handles.gpu_context import GpuContext

__all__ = ["StatusReader", "log_state"]

_FOLDER_SECONDS = 10.0
"""Seconds between two reads of the cubin cache's folder."""
_UNRESPONSIVE_SECONDS = 5.0
"""Seconds for which a worker that did not answer is not queried again."""
_COUNTS = ("submitted", "completed", "failed", "cancelled", "launched", "in_flight", "queued")


class StatusReader:
    """Reads the status of one context, and logs its changes since the last read. Only one thread at a time may use it.

    worker: the context's name in a pool. Its events have the name, too.
    """

    def __init__(self, context: GpuContext, event_log: EventLog, worker: str = "") -> None:
        self._context = context
        self._event_log = event_log
        self._worker_field: dict[str, str] = {"worker": worker} if worker else {}
        self._history = History(context)
        self._last_state: tuple[str, int] = ("", 0)
        self._last_counts: dict[str, tuple[int, dict[str, int]]] = {}
        self._folder: tuple[float, dict[str, int]] = (-_FOLDER_SECONDS, {})
        self._query_after = 0.0

    def read(self, readiness: Mapping[str, Any]) -> dict[str, Any]:
        """The context's part of a snapshot. readiness: ready, state and reason."""
        context = self._context
        children, health, stats = context._children, context.health(), context.stats()
        readiness = {name: readiness[name] for name in Readiness._fields}
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
        self._log_changes(actors, readiness, health.generation)
        device = health.device
        kernels = self._query(self._kernels)
        return {
            "pid": getattr(context, "pid", os.getpid()),
            "verdict": readiness,
            "device": {"kind": device.kind, "name": device.name, "arch": device.arch, "memory": device.memory},
            "runs_kernels": device.runs_kernels,
            "generation": health.generation,
            "oldest_launch": health.oldest_launch,
            "quarantined": list(health.quarantined),
            "actors": actors,
            "history": self._history.read(),
            "kernels": kernels,
            "cubins": self._cubins(),
            "caches": self._query(self._caches),
        }

    def _log_changes(self, actors: list[dict[str, Any]], readiness: Mapping[str, Any], generation: int) -> None:
        first = not self._last_state[0]
        now = (readiness["state"], generation if self._worker_field else 0)
        if now != self._last_state:
            if not first:
                fields = {**self._worker_field, "state": now[0], "before": self._last_state[0]}
                fields |= {"generation": generation} if self._worker_field else {}
                log_state(self._event_log, fields | {"reason": readiness["reason"] or None})
            self._last_state = now
        for actor in actors:
            name, errors, restarts = actor["name"], actor["errors"], actor["restarts"]
            restarts_before, errors_before = self._last_counts.get(name, (0, {}))
            is_local = isinstance(self._context._children.cells[name], ActorCell)
            if restarts > restarts_before and not is_local:
                # The events of an isolated context's actors stay in its process.
                self._event_log.add("actor.restarted", {**self._worker_field, "actor": name, "restarts": restarts})
            for error, count in errors.items():
                more = count - errors_before.get(error, 0)
                if more > 0 and not first:
                    fields = {**self._worker_field, "actor": name, "error": error, "count": more}
                    self._event_log.add("requests.failed", fields, "error")
            self._last_counts[name] = restarts, errors

    def _query(self, query: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]] | None:
        """The answer of the context to a query, or None if it does not answer.

        A query to a process that hangs takes a second, so it is not repeated at each read.
        """
        if time.monotonic() < self._query_after:
            return None
        try:
            return query()
        except DeadlineExceeded:
            self._query_after = time.monotonic() + _UNRESPONSIVE_SECONDS
        except GpuActorsError:
            pass
        return None

    def _kernels(self) -> list[dict[str, Any]]:
        """The kernels that requests have used, the latest first."""
        uses = self._context._children.cells["nvrtc"].shared.uses()
        kernels = []
        for use in reversed(uses):
            parts = list(use.resources.values())
            kernels.append(
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
        return kernels

    def _cubins(self) -> dict[str, int]:
        read_at, counts = self._folder
        now = time.monotonic()
        if now - read_at >= _FOLDER_SECONDS and now >= self._query_after:
            with contextlib.suppress(GpuActorsError):
                stats = self._context.nvrtc.cache_stats()
                names = ("hits", "misses", "compiles", "corrupt", "evicted", "entries", "bytes")
                counts = {name: getattr(stats, name) for name in names}
            self._folder = (time.monotonic(), counts)
        return counts

    def _caches(self) -> list[dict[str, Any]]:
        caches = self._context._children.cells["kv_cache"].shared.look()
        return [
            {
                "number": cache.number,
                "page_size": cache.page_size,
                "kv_heads": cache.kv_heads,
                "head_dim": cache.head_dim,
                "dtype": cache.dtype,
                "pages": cache.stats.blocks,
                "free": cache.stats.free_blocks - cache.stats.prefix_blocks,
                "kept": cache.stats.prefix_blocks,
                "shared": cache.stats.shared_blocks,
                "sequences": cache.stats.sequences,
                "map": cache.pages._asdict(),
            }
            for cache in caches
        ]


def log_state(event_log: EventLog, fields: Mapping[str, Any]) -> None:
    """Log that a state has changed. fields: at least state, before and reason."""
    state = fields["state"]
    level = "error" if state in ("failed", "stalled") else "info" if state == "ready" else "warning"
    event_log.add("state.changed", fields, level)
