"""Clients: the answers to clients over the last minutes, and the verdict that an operator should see first."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from gpu_actors.runtime.meter import SECONDS, Histogram
from gpu_actors.server.http.traffic import OUTCOMES, RouteCounts, Traffic
from gpu_actors.server.status.history import WINDOWS, Records

__all__ = ["Clients", "judge"]

RECENT = 10.0
"""Seconds. Older failures no longer turn the state red, once answers have succeeded since."""

TOLERATED = 0.01
"""The share of refusals, missed deadlines or failures in the last minute above which the state is amber."""

_FEWEST = 3
"""The fewest answers for which a state says "all"."""

Times = Mapping[str, Callable[[], Histogram | None]]


class _Record(NamedTuple):
    """outcomes, late: counts of all routes together. timed: counts by bucket, empty before there is a histogram."""

    time: float
    routes: dict[str, RouteCounts]
    outcomes: dict[str, int]
    late: int
    timed: dict[str, list[int]]


class Clients:
    """The answers to clients. Only one thread at a time may use it.

    timed: functions by name that return a histogram of seconds, or None while there is none.
    """

    def __init__(self, traffic: Traffic, timed: Times) -> None:
        self._traffic = traffic
        self._timed = timed
        self._bounds: dict[str, list[float]] = {name: [] for name in timed}
        self._records = Records(self._now())

    def read(self) -> dict[str, Any]:
        """The outcomes of the last ten seconds and of the last minute, outcomes over time, and outcomes by route.

        late: answers with 504. Other missed deadlines are streams that were cut off.
        """
        now = self._now()
        recent, minute = self._records.before(now, RECENT), self._records.before(now, WINDOWS[0])
        counts = [_outcomes(now, before) for before in (recent, minute)]
        summary = {
            "state": judge(*counts),
            "recent": {"seconds": round(now.time - recent.time, 1), "outcomes": counts[0]},
            "minute": {
                "seconds": round(now.time - minute.time, 1),
                "outcomes": counts[1],
                "late": now.late - minute.late,
            },
            "timed": {name: self._spread(name, now, minute) for name in self._timed},
            "slots": [
                {
                    "ago": round(now.time - later.time, 1),
                    "seconds": round(later.time - earlier.time, 1),
                    "outcomes": _outcomes(later, earlier),
                    "timed": {name: self._spread(name, later, earlier)["most"] for name in self._timed},
                }
                for earlier, later in pairwise(self._records)
            ],
            "routes": [_route(name, now, minute) for name in now.routes],
        }
        self._records.add(now)
        return summary

    def _now(self) -> _Record:
        timed = {}
        for name, read in self._timed.items():
            histogram = read()
            if histogram is not None:
                self._bounds[name] = list(histogram.bounds)
            timed[name] = [] if histogram is None else histogram.counts()
        routes = self._traffic.routes()
        outcomes = {outcome: sum(one.outcomes[outcome] for one in routes.values()) for outcome in OUTCOMES}
        late = sum(one.statuses.get(504, 0) for one in routes.values())
        return _Record(time.monotonic(), routes, outcomes, late, timed)

    def _spread(self, name: str, now: _Record, before: _Record) -> dict[str, Any]:
        later = now.timed[name]
        return _within(later, before.timed[name] or [0] * len(later), self._bounds[name])


def judge(recent: Mapping[str, int], minute: Mapping[str, int]) -> dict[str, str]:
    """Return a grade, "good", "warn", "bad", or "" without requests, and the title and reason of "warn" and "bad".

    recent, minute: answers by outcome, of the last seconds and of the last minute. Invalid requests and clients that
    hung up do not count.
    """
    for counts, span in ((recent, "10 s"), (minute, "minute")):
        total = _total(counts)
        if total >= _FEWEST and counts["refused"] == total:
            return _state("bad", "Refuses all", f"All {total:,} requests of the last {span} got 429.")
        if total >= _FEWEST and not counts["answered"]:
            return _state("bad", "All fail", f"Of {total:,} requests of the last {span} {_parts(counts)}.")
    total = _total(minute)
    if not total:
        return _state("", "", "")
    bad = [
        (minute["failed"], "Requests fail"),
        (minute["refused"], "Overloaded"),
        (minute["deadline"], "Misses deadlines"),
    ]
    title = next((title for count, title in bad if count > TOLERATED * total), "")
    if title:
        return _state("warn", title, f"Of {total:,} requests of the last minute {_parts(minute)}.")
    return _state("good", "", "")


def _state(grade: str, title: str, reason: str) -> dict[str, str]:
    return {"grade": grade, "title": title, "reason": reason}


def _total(counts: Mapping[str, int]) -> int:
    return sum(counts[outcome] for outcome in ("answered", "refused", "deadline", "failed"))


def _parts(counts: Mapping[str, int]) -> str:
    total = _total(counts)
    phrases = {"deadline": "missed their deadline", "failed": "failed", "refused": "got 429"}
    parts = [f"{_percent(counts[outcome] / total)} {words}" for outcome, words in phrases.items() if counts[outcome]]
    return ", ".join(parts)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%" if share < 0.1 else f"{100 * share:.0f}%"


def _outcomes(now: _Record, before: _Record) -> dict[str, int]:
    return {outcome: now.outcomes[outcome] - before.outcomes[outcome] for outcome in OUTCOMES}


def _route(name: str, now: _Record, before: _Record) -> dict[str, Any]:
    """All answers of a route, and how long the answers since ``before`` took."""
    earlier, later = before.routes.get(name, RouteCounts()), now.routes[name]
    return {
        "route": name,
        "statuses": {str(status): count for status, count in sorted(later.statuses.items())},
        "outcomes": later.outcomes,
        "seconds": _within(later.seconds.counts(), earlier.seconds.counts(), SECONDS),
    }


def _within(now: Sequence[int], before: Sequence[int], bounds: Sequence[float]) -> dict[str, Any]:
    """count: values between two moments. half, most: the bounds within which 50% and 99% of the values lie, or None if
    there are no values. A negative number stands for values beyond the last bound."""
    ranks = list(accumulate(later - earlier for later, earlier in zip(now, before, strict=True)))
    count = ranks[-1] if ranks else 0
    if not count:
        return {"count": 0, "half": None, "most": None}
    half, most = ((*bounds, -bounds[-1])[bisect_left(ranks, share * count)] for share in (0.5, 0.99))
    return {"count": count, "half": half, "most": most}
