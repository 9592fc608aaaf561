"""The benchmark of channels gives a figure for each of them."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import channels

pytest.importorskip("ray")


def test_each_channel_and_number_of_workers_has_its_figures(cluster: Any) -> None:
    found: Any = channels.run(calls=20, rounds=1, crowd=8, workers=(1, 2))
    for figures in (found["empty_us"], found["in_1_mib_us"]):
        assert list(figures) == ["direct", "child_process", "ray"]
        assert all(0 < each["median"] <= each["p99"] for each in figures.values())
    assert {count: list(rates) for count, rates in found["requests_a_second_by_workers"].items()} == {
        "1": ["direct", "child_process", "ray"],
        "2": ["direct", "child_process", "ray"],
    }
    assert cluster.is_initialized()
