"""Looker: what one context says of itself at a moment, as plain data."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gpu_actors.errors import DeadlineExceeded, GpuActorsError
from gpu_actors.runtime.cell import ActorCell
from gpu_actors.server.http.readiness import Readiness
from gpu_actors.server.status.event_log import Happenings
from gpu_actors.server.status.history import History

if TYPE_CHECKING:
    from gpu_actors.context import GpuContext

__all__ = ["Looker", "note_state"]

_FOLDER_SECONDS = 10.0
"""Seconds between two looks at the cubin cache's folder."""
_DEAF_SECONDS = 5.0
"""Seconds for which a process that did not answer a question is asked none."""
_COUNTS = ("submitted", "completed", "failed", "cancelled", "launched", "in_flight", "queued")


class Looker:
    """Takes looks at one context, and notes what has changed between two. For one thread at a time.

    worker: its name in a pool, which its events have too.
    """

    def __init__(self, context: GpuContext, happenings: Happenings, worker: str = "") -> None:
        self._context = context
        self._happenings = happenings
        self._named: dict[str, str] = {"worker": worker} if worker else {}
        self._history = History(context)
        self._seen: tuple[str, int] = ("", 0)
        self._errors: dict[str, dict[str, int]] = {}
        self._restarts: dict[str, int] = {}
        self._folder: tuple[float, dict[str, int]] = (-_FOLDER_SECONDS, {})
        self._asked_again = 0.0

    def look(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """The context's part of the state. told: ready, state and reason."""
        context = self._context
        children, health, stats = context._children, context.health(), context.stats()
        verdict = {name: told[name] for name in Readiness._fields}
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
        self._note_changes(actors, verdict, health.generation)
        device = health.device
        kernels = self._asked(self._kernels)
        return {
            "pid": getattr(context, "pid", os.getpid()),
            "verdict": verdict,
            "device": {"kind": device.kind, "name": device.name, "arch": device.arch, "memory": device.memory},
            "runs_kernels": device.runs_kernels,
            "generation": health.generation,
            "oldest_launch": health.oldest_launch,
            "actors": actors,
            "history": self._history.look(),
            "kernels": kernels,
            "cubins": self._cubins(),
            "caches": self._asked(self._caches),
        }

    def _note_changes(self, actors: list[dict[str, Any]], verdict: Mapping[str, Any], generation: int) -> None:
        first = not self._seen[0]
        now = (verdict["state"], generation if self._named else 0)
        if now != self._seen:
            if not first:
                fields = {**self._named, "state": now[0], "before": self._seen[0]}
                fields |= {"generation": generation} if self._named else {}
                note_state(self._happenings, fields | {"reason": verdict["reason"] or None})
            self._seen = now
        for actor in actors:
            name, errors, restarts = actor["name"], actor["errors"], actor["restarts"]
            here = isinstance(self._context._children.cells[name], ActorCell)
            if restarts > self._restarts.get(name, 0) and not here:
                # The events of an isolated context's actors stay in its process.
                self._happenings.note("actor.restarted", {**self._named, "actor": name, "restarts": restarts})
            self._restarts[name] = restarts
            before = self._errors.get(name, {})
            for error, count in errors.items():
                more = count - before.get(error, 0)
                if more > 0 and not first:
                    fields = {**self._named, "actor": name, "error": error, "count": more}
                    self._happenings.note("requests.failed", fields)
            self._errors[name] = errors

    def _asked(self, question: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]] | None:
        """The answer to a question to the context, or None where it does not answer.

        A process that hangs costs its asker a second, so it is not asked again at each look.
        """
        if time.monotonic() < self._asked_again:
            return None
        try:
            return question()
        except DeadlineExceeded:
            self._asked_again = time.monotonic() + _DEAF_SECONDS
        except GpuActorsError:
            pass
        return None

    def _kernels(self) -> list[dict[str, Any]]:
        """The kernels that requests have asked for, the latest first."""
        uses = self._context._children.cells["nvrtc"].shared.uses()
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
        now = time.monotonic()
        if now - read >= _FOLDER_SECONDS and now >= self._asked_again:
            with contextlib.suppress(GpuActorsError):
                stats = self._context.nvrtc.cache_stats()
                names = ("hits", "misses", "compiles", "corrupt", "evicted", "entries", "bytes")
                found = {name: getattr(stats, name) for name in names}
            self._folder = (time.monotonic(), found)
        return found

    def _caches(self) -> list[dict[str, Any]]:
        looks = self._context._children.cells["kv_cache"].shared.look()
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


def note_state(happenings: Happenings, fields: Mapping[str, Any]) -> None:
    """Note that a state has changed. fields: state, before and reason at least."""
    state = fields["state"]
    level = "error" if state in ("failed", "stalled") else "info" if state == "ready" else "warning"
    happenings.note("state.changed", fields, level)
