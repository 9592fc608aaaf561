"""Time limits of tests marked perf: ratios, each measured a stated number of times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

__all__ = ["below", "median_seconds", "yardsticks"]

TRIES = 3


def below(limit: float, ratio: Callable[[], float], tries: int = TRIES) -> None:
    """Fail unless one of a few measurements of a ratio is below the limit, since other work may spoil one."""
    ratios: list[float] = []
    while len(ratios) < tries:
        ratios.append(ratio())
        if ratios[-1] < limit:
            return
    raise AssertionError(f"{tries} of {tries} measurements are not below {limit}: {ratios}")


def median_seconds(
    work: Callable[[], object], repeats: int = 101, clock: Callable[[], float] = time.perf_counter
) -> float:
    """The median time of a call, in seconds of the clock."""
    times = []
    for _ in range(repeats):
        start = clock()
        work()
        times.append(clock() - start)
    return statistics.median(times)


def yardsticks(seconds: float, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds as a multiple of the time of a Python loop of 10,000 turns, so that a limit holds on slow machines too.

    The loop takes 0.22 ms on the machine on which the limits were set.
    """
    return seconds / median_seconds(_yardstick, 21, clock)


def _yardstick() -> int:
    total = 0
    for number in range(10_000):
        total += number & 3
    return total
