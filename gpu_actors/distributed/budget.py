"""RetryBudget: limits how many requests may be repeated, to a share of all requests."""

from __future__ import annotations

import threading

from gpu_actors.errors import InvalidRequest
from gpu_actors.fields import real

__all__ = ["RetryBudget"]


class RetryBudget:
    """A token bucket of repetitions. A new request adds ``ratio`` of a token, up to ``burst``. A repetition takes one.

    So workers that keep failing get at most ``1 + ratio`` times the load. The burst covers the loss of a worker with
    many requests in flight. Safe to use from any thread. Raises `InvalidRequest` for values below 0.
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
        """How many repetitions may be made now."""
        return self._left

    def request(self) -> None:
        """Count a new request."""
        with self._lock:
            self._left = min(self.burst, self._left + self.ratio)

    def take(self) -> bool:
        """Take a token. False if none is left: then no request may be repeated now."""
        with self._lock:
            if self._left < 1.0:
                return False
            self._left -= 1.0
            return True
