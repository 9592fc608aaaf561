"""The share by which one more row of a prompt makes a step longer, measured from steps."""

from __future__ import annotations

import random

import pytest

from gpu_actors.generation.meter import EngineMeter


@pytest.mark.parametrize(("step", "row"), [(0.01, 0.0001), (0.005, 0.0), (0.0, 0.001)])
def test_the_share_of_a_row_is_the_slope_of_the_steps(step: float, row: float) -> None:
    meter, dice = EngineMeter(), random.Random(1)
    sizes = [dice.choice([8, 16, 64, 256]) for _ in range(600)]
    for rows in sizes:
        meter.step(rows, 4, step + row * rows)
    mean = sum(sizes[-100:]) / 100
    expected = max(1e-3, row / (step + row * mean))
    assert meter.row_share == pytest.approx(expected, rel=0.35)


def test_steps_of_one_size_say_nothing_of_it() -> None:
    meter = EngineMeter()
    for _ in range(50):
        meter.step(16, 16, 0.01)
    assert meter.row_share == 1 / 16
    assert sum(meter.rows.counts()) == 50
