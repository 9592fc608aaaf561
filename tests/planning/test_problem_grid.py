"""The grid of problems that attention libraries are tested on: every cell on the mock device, a sample on kernels.

`python -m pytest -n 2 -m sweep tests/planning/test_problem_grid.py` runs it; the default run takes a few cells.
"""

from __future__ import annotations

from collections import Counter

import pytest
from cases.problem_grid import ARCHES, DIMS, GRIDS, Kind, answer, cells, sample

import gpu_actors as ga

# Cells of each head dim and mask that the emulated device answers.
EACH: dict[Kind, int] = {"forward": 3, "backward": 2, "decode": 4}
KERNELS: dict[tuple[Kind, str], set[str]] = {
    ("forward", "sm_80"): {"forward_mma", "forward_wide"},
    ("forward", "sm_90a"): {"forward_sm90", "forward_wide"},
    ("backward", "sm_80"): {"backward_mma", "backward_simple"},
    ("backward", "sm_90a"): {"backward_sm90", "backward_simple"},
    ("decode", "sm_80"): {"decode_mma"},
    ("decode", "sm_90a"): {"decode_mma", "decode_sm90"},
}


@pytest.mark.parametrize("kind", GRIDS)
def test_a_few_cells_agree_with_the_oracle_on_the_mock_device(kind: Kind) -> None:
    with ga.open_context("mock") as ctx:
        for seed, _, cell in sample(kind, 1)[::50]:
            answer(ctx, cell, seed)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kind", GRIDS)
def test_every_cell_agrees_with_the_oracle_on_the_mock_device(kind: Kind, dim: int) -> None:
    with ga.open_context("mock") as ctx:
        for seed, cell in cells(kind, dim):
            try:
                answer(ctx, cell, seed)
            except Exception as error:
                raise AssertionError(f"answer(ctx, {cell}, {seed})") from error


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("contraction", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kind", GRIDS)
def test_a_sample_agrees_with_the_oracle_on_the_emulated_device(kind: Kind, arch: str, contraction: bool) -> None:
    emulation = ga.EmulationOptions(contraction=contraction, arithmetic="hardware")
    answered: Counter[str] = Counter()
    wrong: list[str] = []
    with ga.open_context("emulated", ga.ContextOptions(arch=arch, emulation=emulation)) as ctx:
        for seed, on, cell in sample(kind, EACH[kind]):
            if on != arch:
                continue
            try:
                answered[answer(ctx, cell, seed)] += 1
            except Exception as error:
                wrong.append(f"answer(ctx, {cell}, {seed}): {type(error).__name__}: {str(error)[:500]}")
    print(kind, arch, contraction, dict(answered))  # noqa: T201  for the reports
    assert not wrong, "\n".join(wrong)
    assert set(answered) == KERNELS[kind, arch]
