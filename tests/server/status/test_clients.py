"""The page's verdict on answers to clients, and their last minutes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from inside.runtime import SECONDS, Histogram
from inside.server import OUTCOMES

import gpu_actors as ga
from gpu_actors.server.status import clients
from gpu_actors.server.status.clients import Clients, judge
from gpu_actors.serving import Traffic
from gpu_actors.status import StatusBoard


def counts(**some: int) -> dict[str, int]:
    return {outcome: some.get(outcome, 0) for outcome in OUTCOMES}


NONE = counts()


VERDICTS = [
    (NONE, NONE, "", ""),
    (counts(invalid=9, gone=9), counts(invalid=9, gone=9), "", ""),
    (counts(answered=100), counts(answered=1000), "good", ""),
    (counts(answered=10), counts(answered=99, deadline=1), "good", ""),
    (counts(answered=10), counts(answered=98, deadline=2), "warn", "Misses deadlines"),
    (counts(answered=10), counts(answered=98, failed=2, refused=50), "warn", "Requests fail"),
    (counts(answered=10), counts(answered=98, refused=2), "warn", "Overloaded"),
    (counts(refused=10), counts(answered=98, refused=10), "bad", "Refuses all"),
    (counts(refused=9, deadline=1), counts(answered=98, refused=9, deadline=1), "bad", "All fail"),
    (counts(failed=3, invalid=5), counts(answered=98, failed=3, invalid=5), "bad", "All fail"),
    (NONE, counts(deadline=7), "bad", "All fail"),
    (counts(failed=1), counts(failed=1), "warn", "Requests fail"),
    (counts(answered=1, failed=99), counts(answered=1, failed=500), "warn", "Requests fail"),
]


def test_the_verdict() -> None:
    for recent, minute, grade, title in VERDICTS:
        found = judge(recent, minute)
        assert (found["grade"], found["title"]) == (grade, title)
        assert bool(found["reason"]) == (grade in ("warn", "bad"))
    minute = counts(answered=900, deadline=15, failed=5, refused=80, invalid=1000)
    reason = "Of 1,000 requests of the last minute 1.5% missed their deadline, 0.5% failed, 8.0% got 429."
    assert judge(minute, minute)["reason"] == reason


class Clock:
    """Stands for the module ``time``."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(clients, "time", found)
    return found


def test_windows_and_slots_hold_what_happened_in_them(clock: Clock) -> None:
    traffic, times = Traffic(), Histogram(SECONDS)
    board = Clients(traffic, {"first": lambda: times})
    for slot in range(70):
        for _ in range(slot):
            traffic.count("/v1", 200, "answered", 0.004)
        if slot == 69:
            traffic.count("/v1", 504, "deadline", 40.0)
            times.observe(0.3)
        clock.now += 5.0
        found = board.read()
    assert found["recent"] == {"seconds": 10.0, "outcomes": counts(answered=68 + 69, deadline=1)}
    assert found["minute"]["outcomes"] == counts(answered=sum(range(58, 70)), deadline=1)
    assert found["timed"] == {"first": {"count": 1, "half": 0.5, "most": 0.5}}
    assert len(found["slots"]) == 60, "five minutes, without the one that is under way"
    found = board.read()
    assert found["slots"][-1] == {
        "ago": 0.0,
        "seconds": 5.0,
        "outcomes": counts(answered=69, deadline=1),
        "timed": {"first": 0.5},
    }
    assert found["slots"][0]["ago"] == 295.0
    (route,) = found["routes"]
    assert (route["route"], route["statuses"]) == ("/v1", {"200": sum(range(70)), "504": 1})
    assert route["seconds"] == {"count": sum(range(58, 70)) + 1, "half": 0.005, "most": 0.005}


def test_times_beyond_every_bound_and_histograms_that_come_late(clock: Clock) -> None:
    times: dict[str, Histogram] = {}
    board = Clients(Traffic(), {"first": lambda: times.get("first")})
    assert board.read()["timed"]["first"] == {"count": 0, "half": None, "most": None}
    times["first"] = Histogram((1.0, 2.0))
    times["first"].observe(3.0)
    clock.now += 5.0
    assert board.read()["timed"]["first"] == {"count": 1, "half": -2.0, "most": -2.0}


def test_a_board_shows_the_traffic_of_its_server_alone() -> None:
    def shown(board: StatusBoard) -> Any:
        with ga.open_context("mock") as ctx:
            board.watch(ctx)
            try:
                return json.loads(json.dumps(board.snapshot()))["clients"]
            finally:
                board.close()

    traffic, board = Traffic(), StatusBoard()
    board.show_traffic(traffic)
    traffic.count("/v1", 429, "refused", 0.001)
    assert shown(board)["routes"][0]["statuses"] == {"429": 1}
    assert shown(StatusBoard()) is None, "a program that serves no clients"
