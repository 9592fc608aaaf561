"""Deadlines: absolute or relative, before the launch and after it, and never lost."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
from support.service import answer, eventually, occupied, scripted

import gpu_actors as ga
from gpu_actors.testing import MockClock

pytestmark = pytest.mark.usefixtures("all_threads_end")


def test_deadlines_are_absolute_and_timeouts_relative() -> None:
    clock = MockClock(100.0)
    with scripted(clock=clock, max_in_flight=1) as (_, actor):
        gate = occupied(actor)
        early = actor.submit(answer("early"), deadline=103.0)
        late = actor.submit(answer("late"), timeout=5.0)
        clock.advance(2.9)
        assert not early.done()
        clock.advance(0.1)
        with pytest.raises(ga.DeadlineExceeded):
            early.result(30.0)
        clock.advance(1.9)
        assert not late.done()
        clock.advance(0.2)
        with pytest.raises(ga.DeadlineExceeded):
            late.result(30.0)
        gate.open()


@pytest.mark.parametrize("waiting", [{"deadline": 100.0}, {"deadline": 1}, {"timeout": 0}, {"timeout": -3.0}])
def test_a_deadline_that_has_passed_is_answered_at_once(waiting: dict[str, float]) -> None:
    with scripted(clock=MockClock(100.0)) as (ctx, actor):
        reply = actor.submit(answer(None), **waiting)
        assert reply.done()
        with pytest.raises(ga.DeadlineExceeded, match="had passed when the request was made"):
            reply.result()
        assert isinstance(reply._call.error, TimeoutError)
        stats = ctx.stats()["scripted"]
    assert (stats.submitted, stats.failed, stats.launched) == (1, 1, 0)


def test_a_deadline_and_a_timeout_together_are_refused() -> None:
    with scripted() as (_, actor), pytest.raises(ga.InvalidRequest, match="not both") as caught:
        actor.submit(answer(None), deadline=time.monotonic() + 9, timeout=9).result(30.0)
    assert (caught.value.field, caught.value.value) == ("timeout", 9)


@pytest.mark.parametrize("field", ["deadline", "timeout"])
@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, "soon", True, [1.0], 1j, pytest.param(10**400, id="huge")]
)
def test_a_deadline_that_is_no_finite_number_is_refused(field: str, value: Any) -> None:
    with scripted() as (_, actor), pytest.raises(ga.InvalidRequest, match="finite number") as caught:
        actor.submit(answer(None), **{field: value}).result(30.0)
    assert caught.value.field == field


@pytest.mark.parametrize("timeout", [np.float32(9), np.int64(9), np.float64(9), 1e12, 1e300])
def test_any_finite_real_number_is_a_timeout(timeout: Any) -> None:
    with scripted() as (_, actor):
        assert actor.submit(answer("in time"), timeout=timeout).result(30.0) == "in time"
        with pytest.raises(ga.DeadlineExceeded):
            actor.submit(lambda actor, call: None, timeout=0.01).result(30.0)


def test_an_answered_request_leaves_no_timer_behind() -> None:
    with scripted() as (ctx, actor):
        reply = actor.submit(answer(None), timeout=3600.0)
        reply.result(30.0)
        eventually(lambda: not reply._call.timer.active)
        for _ in range(700):
            actor.submit(answer(None), timeout=3600.0).result(30.0)
        assert len(ctx._children.timers._heap) < 600
