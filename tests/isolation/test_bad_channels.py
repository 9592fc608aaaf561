"""A link over a channel that reorders, doubles and drops; `gpu_actors.remote.Faulty` is one for whole contexts."""

from __future__ import annotations

from typing import Any

from gpu_actors.isolation import channel
from gpu_actors.isolation.channel import Link

NOWHERE: Any = None  # a link that only receives needs no channel


def test_a_gap_is_not_reported_before_its_time_and_once_it_is_filled() -> None:
    got: list[Any] = []
    broken: list[str] = []
    now = [0.0]
    link = Link(NOWHERE, got.append, broken.append, 5.0, lambda: now[0])
    link.received(1, "a")
    link.received(3, "c")
    now[0] = 4.9
    link.check()
    assert got == ["a"]
    link.received(5, "e")
    link.received(2, "b")
    assert got == ["a", "b", "c"]
    now[0] = 9.0
    link.check()  # the gap before 5 is younger
    assert not broken
    now[0] = 15.0
    link.check()
    assert broken == ["record 4 of the channel is missing"]


def test_a_gap_is_reported_once_too_much_has_come_behind_it() -> None:
    broken: list[str] = []
    link = Link(NOWHERE, print, broken.append)
    for sequence in range(2, channel._MOST_EARLY + 3):
        assert not broken
        link.received(sequence, sequence)
    assert broken == ["record 1 of the channel is missing"]


def test_records_that_come_twice_or_too_late_are_dropped() -> None:
    got: list[Any] = []
    link = Link(NOWHERE, got.append, print)
    for sequence in (1, 1, 3, 3, 2, 2, 3, 1, 4):
        link.received(sequence, sequence)
    assert got == [1, 2, 3, 4]
