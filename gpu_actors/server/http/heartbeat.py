"""Proof: when a launch of a context last succeeded, and a launch of its own if no request makes one."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu_actors.context import GpuContext
    from gpu_actors.runtime.reply import Reply

__all__ = ["Proof"]

_LONGEST = 200.0


class Proof:
    """Watches the launches of one context. `look` is for one thread, `missing` for any; neither blocks.

    seconds: how old a success may be. None: a third of ``hang_timeout``, 10 s on CUDA, at most 200 s.
    """

    def __init__(self, context: GpuContext, seconds: float | None = None) -> None:
        self._context = context
        self.seconds: float = min(context._children.hang_timeout / 3, _LONGEST) if seconds is None else seconds
        self._finished = self._count()
        self._since = time.monotonic()  # opening the context has proved its device
        self._probe: Reply[None] | None = None
        self._failure = ""

    @property
    def age(self) -> float:
        """Seconds since a launch was last seen to succeed."""
        return time.monotonic() - self._since

    def look(self) -> None:
        """See whether launches have succeeded since the last look, and launch one if that is long ago."""
        finished, failures = self._count(), self._context.health().failures
        if any(count > self._finished[actor] and not failures[actor] for actor, count in finished.items()):
            self._succeeded()
        self._finished = finished
        if self._probe is not None:
            if not self._probe.done():
                return
            error = self._probe.exception()
            self._probe = None
            if error is None:
                self._succeeded()
            else:
                self._failure = f"{type(error).__name__}: {error}"
        # While requests are launched or fail, their launches and the context's own probes tell enough.
        if self.age >= self.seconds / 2 and self._idle():
            self._probe = self._context.probe(self.seconds if math.isfinite(self.seconds) else None)

    def missing(self) -> str:
        """Why progress of the device is not proven, or an empty string."""
        age = self.age
        if age <= self.seconds:
            return ""
        last = f", the last attempt failed with {self._failure}" if self._failure else ""
        return f"no launch has succeeded for {age:.1f} s{last}"

    def _succeeded(self) -> None:
        self._since = time.monotonic()
        self._failure = ""

    def _idle(self) -> bool:
        ready = self._context.health().ready
        return ready and not any(stats.in_flight for stats in self._context.stats().values())

    def _count(self) -> dict[str, int]:
        """Launches of each actor that have finished."""
        return {actor: stats.launched - stats.in_flight for actor, stats in self._context.stats().items()}
