"""Timers: the one thread of a context that runs callbacks at their times.

Deadlines, restart backoff and the hang check are all timers. The thread starts with the first timer and sleeps on
the context's clock, so a mock clock drives it.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from gpu_actors.clock import Clock
from gpu_actors.errors import GpuActorsError

__all__ = ["Timer", "Timers"]

logger: logging.Logger = logging.getLogger("gpu_actors")

# Seconds. A lock's timeout has an upper limit, and a deadline may be further away.
_LONGEST_SLEEP = 3600.0

# A sweep removes cancelled timers once there are more than this, and more than half of all.
_MIN_CANCELLED = 256


@dataclass(slots=True, eq=False)
class Timer:
    """A callback that is due at a time. `cancel` keeps it from running, if it has not begun."""

    _owner: Timers
    _callback: Callable[[], None] | None

    def cancel(self) -> None:
        if self._callback is not None:
            self._callback = None
            self._owner.cancelled()

    def fire(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()

    @property
    def active(self) -> bool:
        return self._callback is not None


class Timers:
    """Runs callbacks at their times, one after the other, on one thread. Callbacks must be short."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._condition = threading.Condition()
        self._heap: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._cancelled = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def at(self, when: float, callback: Callable[[], None]) -> Timer:
        """Run ``callback`` on the timers' thread once the clock reads ``when``, or at once if that has passed.

        Raises GpuActorsError if the thread cannot be started.
        """
        timer = Timer(self, callback)
        entry = (when, next(self._numbers), timer)
        with self._condition:
            if self._closed:
                return timer
            if self._cancelled > max(_MIN_CANCELLED, len(self._heap) // 2):
                self._sweep()
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="gpu-actors-timers", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the next timer tries again
                    raise GpuActorsError(f"no thread for deadlines can be started: {error}") from error
                self._thread = thread
            first = not self._heap or when < self._heap[0][0]
            try:
                heapq.heappush(self._heap, entry)
                if first:
                    self._condition.notify()
            except BaseException:  # Ctrl-C: the next timer may not be the first one, and would not wake the thread
                self._condition.notify()
                raise
        return timer

    def after(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Run ``callback`` on the timers' thread, this many seconds from now."""
        return self.at(self._clock.now() + seconds, callback)

    def cancelled(self) -> None:
        """Count a cancelled timer. The next timer that is set removes the cancelled ones, if there are many.

        They are not removed here: the garbage collector may cancel a timer at any moment, in the middle of an operation
        on the heap.
        """
        self._cancelled += 1

    def close(self) -> None:
        """Forget every timer and end the thread."""
        with self._condition:
            self._closed = True
            self._heap.clear()
            self._condition.notify()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def after_fork(self) -> None:
        """Close this copy in a forked process, where the thread does not run."""
        self._condition = threading.Condition()
        self._thread = None
        self.close()

    def _sweep(self) -> None:
        self._cancelled = 0
        heap, self._heap = self._heap, []
        for entry in heap:
            if entry[2].active:
                heapq.heappush(self._heap, entry)

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._closed:
                    if not self._heap:
                        self._clock.wait(self._condition, None)
                        continue
                    now, when = self._clock.now(), self._heap[0][0]
                    if when <= now:
                        break
                    self._clock.wait(self._condition, min(when, now + _LONGEST_SLEEP))
                if self._closed:
                    return
                timer = heapq.heappop(self._heap)[2]
            try:
                timer.fire()
            except BaseException:
                # Every deadline of the context needs this thread.
                logger.exception("a timer's callback raised")
