"""Timers: due in order, cancelled, driven by a clock of either kind, and unharmed by callbacks."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from support.service import eventually, service_threads
from support.watched_clock import WatchedClock, WatchedSystemClock

from gpu_actors.errors import GpuActorsError
from gpu_actors.runtime.timers import Timers
from gpu_actors.testing import MockClock

pytestmark = pytest.mark.usefixtures("all_threads_end")


@pytest.fixture
def clock() -> WatchedClock:
    return WatchedClock()


@pytest.fixture
def timers(clock: WatchedClock) -> Iterator[Timers]:
    timers = Timers(clock)
    yield timers
    timers.close()


def test_callbacks_run_in_the_order_of_their_times(clock: WatchedClock, timers: Timers) -> None:
    """Callbacks of one time run in the order in which they were set."""
    ran: list[tuple[float, int]] = []
    for when, number in itertools.product((3.0, 1.0, 2.0), range(20)):
        timers.at(when, lambda when=when, number=number: ran.append((when, number)))
    clock.advance(2.0)
    eventually(lambda: len(ran) == 40)
    clock.advance(1.0)
    eventually(lambda: len(ran) == 60)
    assert ran == list(itertools.product((1.0, 2.0, 3.0), range(20)))


def test_nothing_runs_before_its_time(clock: WatchedClock, timers: Timers) -> None:
    ran = threading.Event()
    timers.after(1.0, ran.set)
    clock.advance_in_vain(0.999)
    assert not ran.is_set()
    clock.advance(0.001)
    assert ran.wait(30.0)


def test_a_time_that_has_passed_is_due_at_once(clock: WatchedClock, timers: Timers) -> None:
    ran = threading.Event()
    timers.at(-5.0, ran.set)
    assert ran.wait(30.0)


def test_an_earlier_timer_wakes_the_thread_from_a_longer_sleep() -> None:
    system_clock = WatchedSystemClock()
    real = Timers(system_clock)
    ran = threading.Event()
    real.after(3600.0, lambda: None)
    eventually(lambda: system_clock.sleepers)
    start = time.monotonic()
    real.after(0.02, ran.set)
    assert ran.wait(30.0)
    assert time.monotonic() - start >= 0.02
    real.close()


def test_a_cancelled_timer_does_not_run_and_lets_go_of_its_callback(clock: WatchedClock, timers: Timers) -> None:
    class Cargo:
        def __call__(self) -> None:
            raise AssertionError("ran")

    cargo = Cargo()
    reference = weakref.ref(cargo)
    timer = timers.after(1.0, cargo)
    assert timer.active
    timer.cancel()
    timer.cancel()
    del cargo
    gc.collect()
    assert not timer.active
    assert reference() is None
    done = threading.Event()
    timers.after(1.0, done.set)
    clock.advance(1.0)
    assert done.wait(30.0)


def test_cancelled_timers_do_not_pile_up(timers: Timers) -> None:
    for _ in range(10_000):
        timers.after(1.0, lambda: None).cancel()
    assert len(timers._heap) < 600


@pytest.mark.parametrize("error", [ZeroDivisionError(), SystemExit(3), KeyboardInterrupt()])
def test_a_callback_that_raises_does_not_keep_others_from_running(
    clock: WatchedClock, timers: Timers, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    ran = threading.Event()
    timers.after(1.0, fail)
    timers.after(1.0, ran.set)
    with caplog.at_level(logging.ERROR):
        clock.advance(1.0)
        assert ran.wait(30.0)
    assert "a timer's callback raised" in caplog.text


@pytest.mark.parametrize("far", [1e10, 1e300, float("inf")])
def test_a_timer_further_away_than_a_thread_can_sleep_delays_no_other(far: float) -> None:
    system_clock = WatchedSystemClock()
    timers = Timers(system_clock)
    timers.after(far, lambda: None)
    eventually(lambda: system_clock.sleepers)
    ran = threading.Event()
    timers.after(0.01, ran.set)
    assert ran.wait(30.0)
    timers.close()


def test_no_thread_runs_before_the_first_timer(clock: WatchedClock, timers: Timers) -> None:
    assert timers._thread is None
    timers.after(1.0, lambda: None)
    assert service_threads()


def test_a_thread_that_cannot_be_started_is_tried_again(
    clock: WatchedClock, timers: Timers, no_more_threads: Any
) -> None:
    with no_more_threads(), pytest.raises(GpuActorsError, match="no thread for deadlines"):
        timers.after(1.0, lambda: None)
    ran = threading.Event()
    timers.after(1.0, ran.set)
    clock.advance(1.0)
    assert ran.wait(30.0)


def test_close_ends_the_thread_and_forgets_every_timer(clock: WatchedClock) -> None:
    timers = Timers(clock)
    timers.after(1.0, pytest.fail)
    timers.close()
    clock.advance(2.0)
    timers.close()
    late = timers.after(0.0, pytest.fail)
    late.cancel()
    assert timers._thread is not None
    assert not timers._thread.is_alive()


def test_a_callback_may_set_a_timer_and_close_the_timers(clock: WatchedClock) -> None:
    timers = Timers(clock)
    nested = threading.Event()

    def again() -> None:
        timers.after(1.0, timers.close)
        nested.set()

    timers.after(1.0, again)
    clock.advance(1.0)
    assert nested.wait(30.0)
    clock.advance(1.0)
    eventually(lambda: timers._thread is not None and not timers._thread.is_alive())


@pytest.mark.parametrize("seconds", [-1.0, -1e-9, math.nan, math.inf])
def test_a_mock_clock_only_moves_forward_by_a_finite_time(seconds: float) -> None:
    clock = MockClock(5.0)
    with pytest.raises(ValueError, match="moves forward"):
        clock.advance(seconds)
    assert clock.now() == 5.0
    clock.advance(0.5)
    assert clock.now() == 5.5


def test_a_sleeper_on_the_mock_clock_wakes_when_it_is_time_and_not_before() -> None:
    clock = MockClock()
    condition = threading.Condition()
    woke: list[float] = []

    def sleep() -> None:
        with condition:
            while clock.now() < 2.0:
                clock.wait(condition, 2.0)
            woke.append(clock.now())

    thread = threading.Thread(target=sleep)
    thread.start()
    for _ in range(4):
        assert not woke
        eventually(lambda: clock._sleepers)
        clock.advance(0.5)
    thread.join(30.0)
    assert woke == [2.0]


def test_no_advance_is_missed_by_a_sleeper_that_is_about_to_sleep() -> None:
    clock = MockClock()
    timers = Timers(clock)
    for _ in range(50):
        ran = threading.Event()
        timers.after(1.0, ran.set)
        clock.advance(1.0)
        assert ran.wait(30.0)
    timers.close()
