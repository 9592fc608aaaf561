"""A thousand random backward problems through the kernels on the emulated device, against the float64 oracle.

python -m pytest -m sweep tests/kernels/test_backward_sweep.py    all; the default run takes one of some variants
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulated.backward import run_case
from emulated.gradients import case_of
from emulated.sweeps import LAUNCHES, Sweep
from inside.testing import poison_unseen_backward
from test_backward_mma import SWEEPS

from gpu_actors.testing import BackwardCase, check_gradients

PROBLEMS = 50  # of each variant
HEADS = ((1, 1), (2, 1), (2, 2), (3, 1), (4, 2))


def random_case(sweep: Sweep, seed: int) -> BackwardCase:
    # Up to a few tiles each way: edges are where kernels err, and the grid of larger shapes is swept elsewhere.
    rng = np.random.default_rng(seed)
    seqlens = int(rng.integers(1, 200)), int(rng.integers(1, 260))
    return case_of(sweep, seed, seqlens, batch=int(rng.integers(1, 4)), heads=HEADS[rng.integers(len(HEADS))])


def check(sweep: Sweep, seed: int, modes: tuple[tuple[str, str], ...]) -> None:
    """Within the tolerance in every mode. dK and dV have the same bits in all, and dQ where that is asked for."""
    case = random_case(sweep, seed)
    repro = f"random_case(SWEEPS[{SWEEPS.index(sweep)}], {seed}): {case.repro}"
    poisoned, given = poison_unseen_backward(case), {"out": case.out, "lse": case.lse, "compute": sweep.compute}
    first: Any = None
    for delivery, schedule in modes:
        found = run_case(
            poisoned,
            compute=sweep.compute,
            deterministic=sweep.deterministic,
            arch=sweep.arch,
            delivery=delivery,
            schedule=schedule,
            seed=seed,
        )
        first = first or found
        same = ["dk", "dv"] + ["dq", "dbias", "dsinks"] * sweep.deterministic
        for name in same:
            np.testing.assert_array_equal(getattr(found, name), getattr(first, name), err_msg=repro)
        if not sweep.deterministic or found is first:
            check_gradients(found, *case.arguments, repro=repro, **given, **case.options)


@pytest.mark.parametrize("sweep", [sweep for sweep in SWEEPS if sweep.usual], ids=str)
def test_a_sample_agrees_with_the_oracle(sweep: Sweep) -> None:
    base = 1000 * SWEEPS.index(sweep)
    check(sweep, base, (LAUNCHES[base % 12], LAUNCHES[(5 * base + 7) % 12]))


@pytest.mark.usefixtures("fused")
def test_a_sample_with_fused_products_agrees_with_the_oracle() -> None:
    sweep = next(sweep for sweep in SWEEPS if sweep.usual)
    check(sweep, 1000 * SWEEPS.index(sweep) + 1, LAUNCHES[3:5])


@pytest.mark.sweep
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sweep", SWEEPS, ids=str)
def test_all_agree_with_the_oracle(sweep: Sweep) -> None:
    base = 1000 * SWEEPS.index(sweep)
    for seed in range(base, base + PROBLEMS):
        check(sweep, seed, LAUNCHES if seed % 10 == 0 else (LAUNCHES[seed % 12],))


def test_the_sweep_counts_a_thousand_problems() -> None:
    assert len(SWEEPS) * PROBLEMS >= 1000
