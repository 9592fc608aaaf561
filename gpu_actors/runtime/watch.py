"""Watch: notes how long ago a launch of a context succeeded, and probes whether launches still succeed.

A context that is not ready receives no requests, and an idle context has none. So both need probes to find out.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable

from gpu_actors.catching import undo_on_error
from gpu_actors.runtime.call import Call
from gpu_actors.runtime.children import Children

__all__ = ["Watch"]


class Watch:
    """Watches the launches of one context. Has at most one probe under way. Safe to use from any thread; never blocks.

    Ages are real seconds, not those of the context's clock: readiness is asked for from outside of the program.

    probe: begins a launch. Its call ends with the launch, or with `DeadlineExceeded` after the given seconds.
    """

    def __init__(self, children: Children, probe: Callable[[float | None], Call[None]]) -> None:
        self._children = children
        self._probe = probe
        self._probing = threading.Lock()  # held while a probe is under way, or has a timer
        self._proved_at = time.monotonic()  # the context opened, so its device works
        self._failure = -math.inf, ""  # when a probe last failed, and its error as text

    @property
    def age(self) -> float:
        """Seconds since a launch last succeeded."""
        return time.monotonic() - max(self._proved_at, self._children.succeeded_at())

    def overdue(self, limit: float) -> str:
        """Why the device counts as stalled if its last success is over ``limit`` seconds old, else an empty string."""
        age = self.age
        if age <= limit:
            return ""
        failed_at, failure = self._failure
        last = f", the last attempt failed with {failure}" if time.monotonic() - failed_at < age else ""
        return f"no launch has succeeded for {age:.1f} s{last}"

    def check(self, limit: float) -> None:
        """Probe if the last success is older than half of ``limit`` seconds. The probe may take ``limit`` seconds."""
        if self.age >= limit / 2 and self._probing.acquire(blocking=False):
            self._launch(limit if math.isfinite(limit) else None)

    def probe_while_failing(self) -> None:
        """Probe every ``probe_interval`` seconds until no vital actor is failing."""
        children = self._children
        if self._failing() and self._probing.acquire(blocking=False):
            with undo_on_error(self._probing.release):
                children.timers.after(children.options.probe_interval, self._probe_again)

    def _failing(self) -> bool:
        return self._children.open and any(progress.failing for progress in self._children.vital_progress())

    def _probe_again(self) -> None:
        if self._failing():
            self._launch(None)
        else:
            self._rest()

    def _launch(self, timeout: float | None) -> None:
        with undo_on_error(self._probing.release):
            call = self._probe(timeout)
        call.when_done(self._ended)

    def _ended(self, call: Call[None]) -> None:
        if call.error is None:
            self._proved_at = time.monotonic()
        else:
            self._failure = time.monotonic(), f"{type(call.error).__name__}: {call.error}"
        self._rest()

    def _rest(self) -> None:
        with contextlib.suppress(RuntimeError):  # after Ctrl-C a call's callback may run twice
            self._probing.release()
        self.probe_while_failing()  # if an actor failed meanwhile, it began no probe, because one was under way
