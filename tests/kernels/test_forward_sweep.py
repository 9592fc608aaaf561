"""Two thousand random problems: both forward kernels on the CPU and the mock device, against the oracle.

`python -m pytest -m sweep tests/kernels/test_forward_sweep.py` runs them all; the default run samples each variant.
A failure prints the line that draws its problem again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import test_forward_mma
import test_forward_simple
from emulated.forward import run_case
from emulated.sweeps import LAUNCHES
from inside.testing import poison_unseen

import gpu_actors as ga
from gpu_actors.testing import ForwardCase, check_output, random_forward

PROBLEMS = 100  # of each variant
HEADS = ((1, 1), (2, 1), (2, 2), (3, 1), (4, 2))


class Variant(NamedTuple):
    """A compiled kernel and what its problems have in common."""

    kernel: str
    arch: str
    compute: str | None
    draw: dict[str, Any]

    def case(self, seed: int) -> ForwardCase:
        # Up to a few tiles each way: edges are where kernels err, and the grid of larger shapes is swept elsewhere.
        rng = np.random.default_rng(seed)
        seqlens = int(rng.integers(1, 100)), int(rng.integers(1, 260))
        batch, heads = int(rng.integers(1, 4)), HEADS[rng.integers(len(HEADS))]
        return random_forward(seed, features=(), seqlens=seqlens, batch=batch, heads=heads, **self.draw)


def variants() -> Iterator[tuple[str, Variant]]:
    """The variants that the kernels' own tests compile, so that nothing is compiled for this alone."""
    for module, kernel in ((test_forward_simple, "forward_simple"), (test_forward_mma, "forward_mma")):
        for sweep in module.SWEEPS:
            names = ("dtype", "head_dim", "head_dim_v", "varlen", "alignment")
            draw = {name: getattr(sweep, name) for name in names} | {"always": sweep.options}
            yield f"{kernel}-{sweep}", Variant(kernel, sweep.arch, sweep.compute, draw)


VARIANTS = dict(variants())


@pytest.fixture(scope="module")
def mock() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx


def check(variant: Variant, seed: int, mock: ga.GpuContext, thorough: bool) -> None:
    """Emulated within the tolerance and bitwise the same in every mode that is tried; mock within the tolerance."""
    case = variant.case(seed)
    poisoned = poison_unseen(case)
    modes = LAUNCHES if thorough else (LAUNCHES[seed % 12], LAUNCHES[(5 * seed + 7) % 12])
    results = [
        run_case(
            poisoned,
            compute=variant.compute,
            kernel=variant.kernel,
            arch=variant.arch,
            delivery=delivery,
            schedule=schedule,
            seed=seed,
        )
        for delivery, schedule in modes
    ]
    repro = f"VARIANTS[...].case({seed}): {case.repro}"
    for out, lse in results:
        np.testing.assert_array_equal(out, results[0][0], err_msg=repro)
        np.testing.assert_array_equal(lse, results[0][1], err_msg=repro)
    check_output(*results[0], *case.inputs, repro=repro, compute=variant.compute, **case.options)
    answer = mock.flash_attn.forward(*case.inputs, **case.options, compute=variant.compute, return_lse=True).result(60)
    check_output(answer.out, answer.lse, *case.inputs, repro=repro, compute=variant.compute, **case.options)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_sample_agrees_with_the_oracle(name: str, mock: ga.GpuContext) -> None:
    base = 1000 * list(VARIANTS).index(name)
    for seed in range(base, base + 2):
        check(VARIANTS[name], seed, mock, thorough=False)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", list(VARIANTS)[::5])
def test_a_sample_with_fused_products_agrees_with_the_oracle(name: str, mock: ga.GpuContext) -> None:
    check(VARIANTS[name], 1000 * list(VARIANTS).index(name), mock, thorough=False)


@pytest.mark.sweep
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", VARIANTS)
def test_all_agree_with_the_oracle(name: str, mock: ga.GpuContext) -> None:
    base = 1000 * list(VARIANTS).index(name)
    for seed in range(base, base + PROBLEMS):
        check(VARIANTS[name], seed, mock, thorough=seed % 10 == 0)


def test_the_sweep_counts_two_thousand_problems() -> None:
    assert len(VARIANTS) * PROBLEMS >= 2000
