"""Progress: whether an actor's work still succeeds, for the context's health and readiness.

It has two counts, each since the last success: launches that failed, and incarnations that ended with an exception.
The time between failures does not matter, so an actor that fails slowly is noticed too.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gpu_actors.errors import ActorFailed, CompileError, GpuActorsError, LaunchError, MockModeError, OutOfDeviceMemory

__all__ = ["Progress", "is_failure"]

_FAILURES = (LaunchError, OutOfDeviceMemory, CompileError, ActorFailed)


def is_failure(error: BaseException) -> bool:
    """Whether an error is a fault of the service, rather than of the request."""
    return isinstance(error, _FAILURES) or type(error) is GpuActorsError or not isinstance(error, GpuActorsError)


@dataclass(eq=False)
class Progress:
    """Counts the failures of one actor, and notes its last success. Safe to use from any thread.

    limit: how many failures without a success make the actor ``failing``.
    answered: returns how many requests the actor has answered with a result.
    on_failing: called at each failure while the actor is failing, on the thread that saw the failure.
    succeeded_at: ``time.monotonic()`` when a launch last succeeded, -inf before the first one.
    """

    limit: int
    answered: Callable[[], int]
    on_failing: Callable[[], object]
    succeeded_at: float = -math.inf
    failed_launches: int = 0
    _crashes: int = 0
    _completed_before: int = 0
    _last: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def launch_ended(self, error: BaseException | None) -> None:
        """Note that a launch, or the compilation of a kernel for one, ended with ``error``, or succeeded if None."""
        if error is None or isinstance(error, MockModeError):
            # A mock device that does not compute answers MockModeError.
            self.failed_launches = 0
            self.succeeded_at = time.monotonic()
        elif is_failure(error):
            with self._lock:
                self.failed_launches += 1
            self._note(error)

    def crashed(self, error: BaseException) -> None:
        """Note that an incarnation of the actor ended with an exception."""
        with self._lock:
            self._crashes = self.crashes + 1
            self._completed_before = self.answered()
        self._note(error)

    @property
    def crashes(self) -> int:
        """How many incarnations have ended with an exception since a request was last answered with a result."""
        return self._crashes if self.answered() == self._completed_before else 0

    @property
    def failures(self) -> int:
        """The greater of ``failed_launches`` and ``crashes``."""
        return max(self.failed_launches, self.crashes)

    @property
    def failing(self) -> bool:
        return self.failures >= self.limit

    @property
    def reason(self) -> str:
        """How the actor fails, as text."""
        what = f"{self.failed_launches} launches" if self.failed_launches >= self.crashes else f"{self.crashes} times"
        return f"has failed {what} in a row, last with {self._last}"

    @property
    def counts(self) -> tuple[int, int, int]:
        """The requests answered with a result, the launches that failed in a row, and the crashes in a row."""
        return self.answered(), self.failed_launches, self.crashes

    def put_on_trial(self, completed: int, failed_launches: int, crashes: int) -> None:
        """Note that a probe succeeded. The actor is no longer ``failing``, but one more failure makes it so again.

        The probe is no request, so its success does not end a row of failures. completed, failed_launches, crashes:
        the actor's ``counts`` before the probe.
        """
        with self._lock:
            answered, failed_now, crashes_now = self.counts
            if answered - completed <= 1:
                failed_now, crashes_now = max(failed_now, failed_launches), max(crashes_now, crashes)
            if max(failed_now, crashes_now) >= self.limit:
                failed_now = crashes_now = self.limit - 1
            self.failed_launches, self._crashes, self._completed_before = failed_now, crashes_now, answered

    def _note(self, error: BaseException) -> None:
        if self.failing:
            # Kept as text: the error itself holds the request that it answered, with its arrays.
            self._last = f"{type(error).__name__}: {error}"
            self.on_failing()
