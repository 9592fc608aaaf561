"""Heartbeat: when a launch of a context last succeeded, and a small launch if no request makes one."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_actors.handles.gpu_context import GpuContext
    from gpu_actors.runtime.reply import Reply

__all__ = ["Heartbeat"]

_LONGEST = 200.0


class Heartbeat:
    """Watches the launches of one context. `check` is for one thread, `overdue` for any; neither blocks.

    seconds: how old a success may be. None: a third of ``hang_timeout``, 10 s on CUDA, at most 200 s.
    """

    def __init__(self, context: GpuContext, seconds: float | None = None) -> None:
        self._context = context
        self.seconds: float = min(context._children.hang_timeout / 3, _LONGEST) if seconds is None else seconds
        self._finished_launches = self._count_finished()
        self._last_success = time.monotonic()  # the context opened, so its device works
        self._probe: Reply[None] | None = None
        self._failure = ""

    @property
    def age(self) -> float:
        """Seconds since a launch last succeeded."""
        return time.monotonic() - self._last_success

    def check(self) -> None:
        """Record whether launches have succeeded since the last check, and launch one if that is long ago."""
        finished, failures = self._count_finished(), self._context.health().failures
        if any(count > self._finished_launches[actor] and not failures[actor] for actor, count in finished.items()):
            self._succeeded()
        self._finished_launches = finished
        if self._probe is not None:
            if not self._probe.done():
                return
            error = self._probe.exception()
            self._probe = None
            if error is None:
                self._succeeded()
            else:
                self._failure = f"{type(error).__name__}: {error}"
        # While requests are launched or fail, their launches and the context's own probes are enough.
        if self.age >= self.seconds / 2 and self._idle():
            self._probe = self._context.probe(self.seconds if math.isfinite(self.seconds) else None)

    def overdue(self) -> str:
        """Why the device counts as stalled, or an empty string."""
        age = self.age
        if age <= self.seconds:
            return ""
        last = f", the last attempt failed with {self._failure}" if self._failure else ""
        return f"no launch has succeeded for {age:.1f} s{last}"

    def _succeeded(self) -> None:
        self._last_success = time.monotonic()
        self._failure = ""

    def _idle(self) -> bool:
        ready = self._context.health().ready
        return ready and not any(stats.in_flight for stats in self._context.stats().values())

    def _count_finished(self) -> dict[str, int]:
        """Launches of each actor that have finished."""
        return {actor: stats.launched - stats.in_flight for actor, stats in self._context.stats().items()}
