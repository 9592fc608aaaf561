"""The clocks: what they accept, and that they can be slept on."""

from __future__ import annotations

import math
import threading
import time

import pytest
from inside.package import SYSTEM_CLOCK

from gpu_actors.testing import MockClock


@pytest.mark.parametrize("seconds", [-1.0, -1e-9, math.nan, math.inf])
def test_a_mock_clock_only_moves_forward_by_a_finite_time(seconds: float) -> None:
    clock = MockClock(5.0)
    with pytest.raises(ValueError, match="moves forward"):
        clock.advance(seconds)
    assert clock.now() == 5.0


def test_a_wait_may_be_longer_than_a_thread_can_be_asked_to_sleep() -> None:
    condition, woken = threading.Condition(), threading.Event()

    def sleep() -> None:
        with condition:
            SYSTEM_CLOCK.wait(condition, time.monotonic() + 1e12)
        woken.set()

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    while not woken.wait(0.01):
        assert sleeper.is_alive(), "the wait raised"
        with condition:
            condition.notify_all()
    sleeper.join()


def test_a_wait_ends_at_its_time() -> None:
    condition = threading.Condition()
    with condition:
        SYSTEM_CLOCK.wait(condition, time.monotonic() - 1.0)
        began = time.monotonic()
        SYSTEM_CLOCK.wait(condition, began + 0.02)
    assert time.monotonic() - began >= 0.02
