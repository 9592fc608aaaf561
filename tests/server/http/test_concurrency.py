"""ConcurrencyLimit: what it knows of each number of pieces, for how long, and where the limit goes."""

from __future__ import annotations

import pytest

from gpu_actors.server.http.concurrency import FIRST, ConcurrencyLimit


def measured(limit: ConcurrencyLimit, pieces: int, seconds: float, now: float, turns: int = 1) -> float:
    """Run this many pieces of ten units with this time a unit, for some turns. Returns the time afterwards."""
    for _ in range(turns):
        now += 10 * seconds
        for _ in range(pieces):
            limit.record(pieces, seconds, 1.0, 10 * seconds, now)
    return now


def test_nothing_is_known_before_something_was_measured() -> None:
    limit = ConcurrencyLimit(256)
    assert limit.unit_seconds(1, 0.0) is None
    assert (limit.room(0.0), limit.limit) == (FIRST, 256)


def test_more_pieces_than_were_seen_take_a_time_in_proportion_and_fewer_the_same() -> None:
    limit = ConcurrencyLimit(256)
    now = measured(limit, 16, 0.01, 0.0)
    assert limit.unit_seconds(64, now) == pytest.approx(0.04)
    assert limit.unit_seconds(16, now) == pytest.approx(0.01)
    assert limit.unit_seconds(2, now) == pytest.approx(0.01)
    assert limit.unit_seconds_alone() == pytest.approx(0.01 / 16)


def test_twice_as_many_may_run_as_were_measured_of_late() -> None:
    limit = ConcurrencyLimit(256)
    now = measured(limit, 16, 0.01, 0.0)
    assert limit.room(now) == 32
    now = measured(limit, 32, 0.01, now)
    assert limit.room(now) == 64
    assert limit.room(now + 60.0) == FIRST, "it is long ago"
    assert limit.unit_seconds(32, now + 60.0) == pytest.approx(0.01), "but better than nothing"


def test_a_bad_moment_is_forgotten() -> None:
    limit = ConcurrencyLimit(256)
    now = measured(limit, 4, 5.0, 0.0)
    now = measured(limit, 2, 0.01, now + 300.0, 10)
    assert limit.unit_seconds(4, now) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("seconds", "least", "most"),
    [
        (lambda pieces: 0.02, 64, 64),
        (lambda pieces: 0.001 * pieces, 8, 16),
        (lambda pieces: 0.004 + 0.00025 * pieces, 32, 64),
        (lambda pieces: 0.001 * pieces**1.5, 8, 8),
    ],
    ids=["room for all", "full with one", "a step and its texts", "thrashing"],
)
def test_the_limit_goes_where_twice_as_many_would_do_hardly_more(seconds: object, least: int, most: int) -> None:
    assert callable(seconds)
    limit, now = ConcurrencyLimit(64), 0.0
    limits = []
    for _ in range(60):
        limit.record_demand()
        now = measured(limit, limit.limit, seconds(limit.limit), now)
        limits.append(limit.limit)
    usual = sorted(limits[20:])
    assert least <= usual[len(usual) // 2] <= most
    assert min(limits) >= 8


def test_a_limit_that_nobody_meets_stays() -> None:
    limit, now = ConcurrencyLimit(64), 0.0
    for _ in range(20):
        now = measured(limit, 4, 0.01, now)
    assert limit.limit == 64
