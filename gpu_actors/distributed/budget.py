"""RetryBudget: how many requests may be repeated, as a share of those that are made."""

from __future__ import annotations

import threading

from gpu_actors.errors import InvalidRequest
from gpu_actors.fields import real

__all__ = ["RetryBudget"]


class RetryBudget:
    """A bucket of repetitions. Each new request puts ``ratio`` of one in, up to ``burst``; each repetition takes one.

    So workers that fail again and again get at most ``1 + ratio`` times the load, and a death with many requests in
    flight is answered from the burst. Safe to use from any thread. Raises `InvalidRequest` for values below 0.
    """

    def __init__(self, ratio: float = 0.1, burst: float = 256.0) -> None:
        for name, value in (("ratio", ratio), ("burst", burst)):
            if real(name, value) < 0:
                raise InvalidRequest(name, value, "must be a number >= 0")
        self.ratio = float(ratio)
        self.burst = float(burst)
        self._lock = threading.Lock()
        self._left = self.burst

    @property
    def left(self) -> float:
        """Repetitions that may be made now."""
        return self._left

    def request(self) -> None:
        """A new request is made."""
        with self._lock:
            self._left = min(self.burst, self._left + self.ratio)

    def take(self) -> bool:
        """Whether a request may be repeated now."""
        with self._lock:
            if self._left < 1.0:
                return False
            self._left -= 1.0
            return True
