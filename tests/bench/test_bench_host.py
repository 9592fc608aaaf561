"""``gpu-actors bench host``: requests on a driver that takes no time."""

from __future__ import annotations

import time

import pytest
from inside.cuda import NullApi

from gpu_actors.bench.host import run


def test_a_request_is_measured_beside_to_thread_in_every_way_and_its_driver_calls_counted() -> None:
    figures = run(("append",), requests=50)
    for name in ("no_time", "kernel_50_us"):
        rows = figures[name]
        assert rows.keys() == {"to_thread", "append"}
        for row in rows.values():
            assert row.keys() == {"alone", "gather", "in_turn"}
            assert all(way["us"] > 0 and way["ratio"] > 0 for way in row.values())
        assert all(way["ratio"] == 1 for way in rows["to_thread"].values())
    calls = figures["driver_calls"]["append"]
    assert calls["launch_kernel"] == 1
    assert calls["all"] == pytest.approx(sum(calls.values()) - calls["all"], abs=0.1)


def test_an_event_is_done_as_long_after_its_record_as_a_kernel_takes() -> None:
    api = NullApi(seconds=0.05)
    event = api.create_event()
    assert api.event_done(event)  # never recorded
    start = time.perf_counter()
    api.record_event(event, 0)
    assert not api.event_done(event)
    api.synchronize_event(event)
    assert time.perf_counter() - start >= 0.05
    assert api.event_done(event)
