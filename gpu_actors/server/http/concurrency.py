"""Pace: how fast work goes while so many pieces of it are worked on, and how many are worth it.

Pieces that share a device slow each other down; how much, only a measurement tells. A device with room takes the same
time for each, one that is full a time in proportion to their number. Pieces over the time of a unit is the rate
(Little, "A proof for the queuing formula L = lambda W", 1961). The limit climbs this curve a power of two at a time,
as .NET's thread pool does (Hellerstein, Morrison and Eilebrecht, "Optimizing concurrency levels in the .NET
ThreadPool", 2009): it stops where twice as many would do hardly more, since each piece then only takes longer.
"""

from __future__ import annotations

import math

__all__ = ["Pace"]

_PIECES = 10
"""Pieces that a moving average is over, at least."""
_GAIN = 0.9
_KEPT, _TURNS = 3.0, 16
"""Seconds, or times that each piece may take, after which the limit tries what it has left: it may be better now."""
_LATE, _LATE_TURNS = 2.0, 4
"""Seconds, or times that each piece may take, for which a measurement is late news."""
_NEWS = 0.2
"""Seconds after which one that would be refused is tried where nothing runs."""
_SURE, _SURE_SECONDS = 0.25, 0.25
"""The share of its work that each piece has done, or seconds, after which a number of them is known."""
FIRST = 16
"""Pieces that may begin before anything is measured."""
_LEAST = 8
"""Pieces of which a limit is no more than: so few are the operator's choice."""


class _Level:
    """A moving average of seconds a unit. seen: of how many pieces. since, at: when it was noted first and last."""

    __slots__ = ("at", "seconds", "seen", "since")

    def __init__(self, now: float) -> None:
        self.seconds = self.seen = 0.0
        self.since = self.at = now


class Pace:
    """Seconds a unit of work, by the power of two of the pieces that are worked on. most: pieces, ever.

    limit: how many are worth it at once, as measured.
    """

    def __init__(self, most: int) -> None:
        self.limit = most
        self._most = most
        self._levels: dict[int, _Level] = {}
        self._turned = 0.0
        self._short = False
        self._hold = self._pieces = 0.0

    def note(self, pieces: float, seconds: float, share: float, hold: float, now: float) -> None:
        """A unit took so many seconds while so many pieces were worked on.

        share: of a whole piece that this was measured over. hold: seconds that a whole one takes.
        """
        number = round(math.log2(max(pieces, 1.0)))
        level = self._levels.get(number)
        if level is None or now - level.at > self._late:
            level = self._levels[number] = _Level(now)
        level.seen += share
        # Over as many pieces as run together: of those some begin and some end, which is not the same.
        weight = share / min(level.seen, max(_PIECES, 1 << number))
        level.seconds += weight * (seconds * (1 << number) / max(pieces, 1.0) - level.seconds)
        level.at = now
        self._hold = hold
        self._turned += share
        self._pieces += min(1.0, share / _PIECES) * (pieces - self._pieces)
        if self._turned >= max(self._pieces, 1.0):
            self._climb(now)
            self._turned, self._short = 0.0, False

    def wanted_more(self) -> None:
        """Someone had to wait, or was refused: more would run if more were let in."""
        self._short = True

    def is_news(self, now: float) -> bool:
        """Whether anything was measured just now."""
        return any(now - one.at <= _NEWS for one in self._levels.values())

    def at(self, pieces: float, now: float) -> float | None:
        """Seconds a unit while so many are worked on, None where nothing is known.

        From the nearest power of two that was seen of late: beyond it in proportion, as on a device that is full, below
        it the same, and at most what more pieces take. What was seen in a bad moment counts no longer than that lasts.
        """
        levels = self._of_late(now) or self._levels
        if not levels:
            return None
        pieces = max(pieces, 1.0)
        wanted = math.log2(pieces)
        number = min(levels, key=lambda one: (abs(one - wanted), one))
        more = (one.seconds for other, one in levels.items() if other >= wanted)
        return min([levels[number].seconds * max(1.0, pieces / (1 << number)), *more])

    def alone(self) -> float:
        """Seconds a unit, at least, of a piece that runs alone."""
        return min((one.seconds / (1 << number) for number, one in self._levels.items()), default=0.0)

    def room(self, now: float) -> int:
        """Pieces that may run now: the limit, or twice as many as were measured of late, where that is less."""
        known = (
            2 << number
            for number, one in self._of_late(now).items()
            if one.seen >= _SURE * (1 << number) or one.at - one.since >= _SURE_SECONDS
        )
        return min(self.limit, max([FIRST, *known]))

    @property
    def _late(self) -> float:
        return max(_LATE, _LATE_TURNS * self._hold)

    def _of_late(self, now: float) -> dict[int, _Level]:
        return {number: one for number, one in self._levels.items() if now - one.at <= self._late}

    def _climb(self, now: float) -> None:
        """Move the limit by one power of two, where that is worth it or not known."""
        kept = max(_KEPT, _TURNS * self._hold)
        fresh = {number: one for number, one in self._levels.items() if now - one.at <= kept}
        here = round(math.log2(max(min(self._pieces, self.limit), 1.0)))
        if not self._short or here not in fresh:
            return  # fewer ran than could have, so this says nothing of the limit
        self._levels = fresh
        rates = {number: (1 << number) / one.seconds for number, one in fresh.items() if one.seconds}
        enough = _GAIN * max(rates.values(), default=0.0)
        least, most = math.ceil(math.log2(min(_LEAST, self._most))), math.ceil(math.log2(self._most))
        if here > least and rates.get(here - 1, math.inf) >= enough:
            here -= 1
        elif here < most and (rates.get(here, 0.0) < enough or here + 1 not in rates):
            here += 1
        self.limit = min(self._most, 1 << max(here, least))
