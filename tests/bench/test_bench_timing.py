"""Timing: what lies between two marks, how subjects take turns, and the quantiles."""

from __future__ import annotations

import numpy as np
import pytest
from support.bench import FakeClock

from gpu_actors.bench.timing import Plan, measure_in_turns, quantiles
from gpu_actors.errors import InvalidRequest


@pytest.mark.parametrize("count", [1, 2, 3, 10, 31])
def test_quantiles_are_those_of_numpy(count: int) -> None:
    samples = list(np.random.default_rng(count).exponential(size=count))
    result = quantiles(samples)
    shares = {"least": 0, "p10": 10, "p25": 25, "median": 50, "p75": 75, "p90": 90, "most": 100}
    for name, share in shares.items():
        assert getattr(result, name) == pytest.approx(np.percentile(samples, share)), name
    assert result.n == count


def test_there_are_no_quantiles_of_nothing() -> None:
    with pytest.raises(InvalidRequest):
        quantiles([])


@pytest.mark.parametrize("name", ["warmup", "repeats", "turns"])
def test_a_plan_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="1 or more"):
        Plan(**{name: 0})


def test_each_call_is_timed_alone_and_inputs_are_rotated_through() -> None:
    clock, made = FakeClock(), []

    def call(number: int) -> None:
        made.append(number)
        clock.work(10.0 * (number + 1))

    calls = [lambda number=number: call(number) for number in range(3)]
    result = measure_in_turns({"one": calls}, clock, Plan(warmup=2, repeats=7, turns=3))["one"]
    assert made[:6] == [0, 1, 2] * 2  # the warm-up
    assert made[6:] == [0, 1, 2, 0, 1, 2, 0]
    assert result.times is not None
    assert (result.times.n, result.times.least, result.times.median, result.times.most) == (7, 10, 20, 30)
    assert result.held


def test_subjects_take_turns_and_nothing_is_timed_before_it_is_warm() -> None:
    clock, order = FakeClock(), []
    subjects = {name: [lambda name=name: order.append(name)] for name in "ab"}
    idle = []
    measure_in_turns(subjects, clock, Plan(warmup=1, repeats=4, turns=2), lambda: idle.append(len(order)))
    assert order == ["a", "b", *"aabb", *"aabb"]
    assert idle == [1, 2, 4, 6, 8, 10]
    assert clock.calls[:2] == ["synchronize"] * 2
    turn = ["hold", *["mark"] * 4, "release", "synchronize"]
    assert clock.calls[2:] == turn * 4


def test_a_stream_that_went_on_too_soon_is_reported() -> None:
    subjects = {"late": [lambda: None], "in time": [lambda: None]}
    result = measure_in_turns(subjects, FakeClock(late=1), Plan(repeats=4, turns=2))
    assert (result["late"].held, result["in time"].held) == (False, True)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_subject_that_raises_is_reported_and_the_others_go_on(after: int) -> None:
    clock, left = FakeClock(), [after]

    def raises() -> None:
        if left[0] == 0:
            raise RuntimeError("no kernel image")
        left[0] -= 1

    result = measure_in_turns(
        {"bad": [raises], "good": [lambda: clock.work(5)]}, clock, Plan(warmup=1, repeats=4, turns=2)
    )
    assert result["bad"].error == "RuntimeError: no kernel image"
    assert result["bad"].times is None
    assert result["good"].times is not None
    assert result["good"].times.median == 5
    assert clock.calls.count("hold") == clock.calls.count("release")


def test_what_the_device_reports_afterwards_is_the_subjects_error() -> None:
    failures = iter([None, ValueError("illegal address")])

    def between() -> None:
        failure = next(failures, None)
        if failure is not None:
            raise failure

    result = measure_in_turns({"a": [lambda: None], "b": [lambda: None]}, FakeClock(), Plan(), between)
    assert result["a"].times is not None
    assert result["b"].error == "ValueError: illegal address"
