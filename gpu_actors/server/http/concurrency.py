"""ConcurrencyLimit: how many pieces of work are worth running at once, by measured throughput.

The rate of work is the number of pieces divided by the time of a unit (Little, "A proof for the queuing formula
L = lambda W", 1961). The limit climbs the curve of this rate by one power of two at a time, as .NET's thread pool does
(Hellerstein, Morrison and Eilebrecht, "Optimizing concurrency levels in the .NET ThreadPool", 2009). It stops where
twice as many pieces would hardly raise the rate.
"""

from __future__ import annotations

import math

__all__ = ["ConcurrencyLimit"]

_PIECES = 10
"""The least number of pieces that a moving average covers."""
_GAIN = 0.9
_RETRY_SECONDS, _RETRY_PIECES = 3.0, 16
"""Seconds, or durations of a piece if they are longer, after which the limit tries another level again."""
_RECENT_SECONDS, _RECENT_PIECES = 2.0, 4
"""Seconds, or durations of a piece if they are longer, for which a measurement counts as recent."""
_FRESH_SECONDS = 0.2
"""After this many seconds without a measurement, a piece that would be refused is tried if nothing runs."""
_SURE, _SURE_SECONDS = 0.25, 0.25
"""The share of each piece's work, or the seconds, after which the measurement of a level counts as sure."""
FIRST = 16
"""How many pieces may begin before anything is measured."""
_LEAST = 8
"""The lowest limit, unless the operator allows fewer pieces."""


class _Level:
    """A moving average of the seconds per unit. pieces: how many it covers. first, last: times of its records."""

    __slots__ = ("first", "last", "pieces", "seconds")

    def __init__(self, now: float) -> None:
        self.seconds = self.pieces = 0.0
        self.first = self.last = now


class ConcurrencyLimit:
    """Measures the seconds per unit of work for each power of two of pieces that run at once.

    most: the highest limit.
    limit: how many pieces are worth running at once.
    """

    def __init__(self, most: int) -> None:
        self.limit = most
        self._most = most
        self._levels: dict[int, _Level] = {}
        self._measured = 0.0
        self._demand = False
        self._hold = self._pieces = 0.0

    def record(self, pieces: float, seconds: float, share: float, hold: float, now: float) -> None:
        """Record the seconds that a unit took, and how many pieces ran meanwhile.

        share: the share of a whole piece that was measured. hold: the seconds that a whole piece takes.
        """
        number = round(math.log2(max(pieces, 1.0)))
        level = self._levels.get(number)
        if level is None or now - level.last > self._recent_seconds:
            level = self._levels[number] = _Level(now)
        level.pieces += share
        # The average covers as many pieces as run together, since beginning pieces and ending ones differ.
        weight = share / min(level.pieces, max(_PIECES, 1 << number))
        level.seconds += weight * (seconds * (1 << number) / max(pieces, 1.0) - level.seconds)
        level.last = now
        self._hold = hold
        self._measured += share
        self._pieces += min(1.0, share / _PIECES) * (pieces - self._pieces)
        if self._measured >= max(self._pieces, 1.0):
            self._climb(now)
            self._measured, self._demand = 0.0, False

    def record_demand(self) -> None:
        """Record that a piece had to wait or was refused: more pieces would run under a higher limit."""
        self._demand = True

    def is_fresh(self, now: float) -> bool:
        return any(now - one.last <= _FRESH_SECONDS for one in self._levels.values())

    def unit_seconds(self, pieces: float, now: float) -> float | None:
        """Seconds per unit while ``pieces`` pieces run, None before the first measurement.

        The value comes from the nearest power of two that was measured recently. More pieces than that take longer in
        proportion, as on a full device; fewer take the same time. The result is never above the measurement of a higher
        power of two. A measurement from a bad moment counts only while it is recent.
        """
        levels = self._recent(now) or self._levels
        if not levels:
            return None
        pieces = max(pieces, 1.0)
        exponent = math.log2(pieces)
        number = min(levels, key=lambda one: (abs(one - exponent), one))
        more = (one.seconds for other, one in levels.items() if other >= exponent)
        return min([levels[number].seconds * max(1.0, pieces / (1 << number)), *more])

    def unit_seconds_alone(self) -> float:
        """The least possible seconds per unit of a piece that runs alone."""
        return min((one.seconds / (1 << number) for number, one in self._levels.items()), default=0.0)

    def room(self, now: float) -> int:
        """How many pieces may run now: the limit, or twice the most that were measured recently, if that is less."""
        known = (
            2 << number
            for number, one in self._recent(now).items()
            if one.pieces >= _SURE * (1 << number) or one.last - one.first >= _SURE_SECONDS
        )
        return min(self.limit, max([FIRST, *known]))

    @property
    def _recent_seconds(self) -> float:
        return max(_RECENT_SECONDS, _RECENT_PIECES * self._hold)

    def _recent(self, now: float) -> dict[int, _Level]:
        return {number: one for number, one in self._levels.items() if now - one.last <= self._recent_seconds}

    def _climb(self, now: float) -> None:
        """Move the limit by one power of two, if the new one is faster, as fast with fewer pieces, or not measured."""
        seconds = max(_RETRY_SECONDS, _RETRY_PIECES * self._hold)
        fresh = {number: one for number, one in self._levels.items() if now - one.last <= seconds}
        exponent = round(math.log2(max(min(self._pieces, self.limit), 1.0)))
        if not self._demand or exponent not in fresh:
            return  # fewer pieces ran than could have, so this says nothing about the limit
        self._levels = fresh
        rates = {number: (1 << number) / one.seconds for number, one in fresh.items() if one.seconds}
        enough = _GAIN * max(rates.values(), default=0.0)
        least, most = math.ceil(math.log2(min(_LEAST, self._most))), math.ceil(math.log2(self._most))
        if exponent > least and rates.get(exponent - 1, math.inf) >= enough:
            exponent -= 1
        elif exponent < most and (rates.get(exponent, 0.0) < enough or exponent + 1 not in rates):
            exponent += 1
        self.limit = min(self._most, 1 << max(exponent, least))
