"""Every row of `matrix`: kernels on the emulated device against the oracle, under several schedules and deliveries."""

from __future__ import annotations

import pytest
from matrix.table import FAMILIES

ROWS = [
    pytest.param(family, row, marks=[pytest.mark.sweep] * (row in module.RARE), id=f"{family}-{row}")
    for family, module in FAMILIES.items()
    for row in module.ROWS
]
GRID = {f"{family}-{variant}": (family, variant) for family, module in FAMILIES.items() for variant in module.GRID}
USUAL = [name for name, (family, variant) in GRID.items() if variant in FAMILIES[family].USUAL]


@pytest.mark.timeout(180)  # a row builds its kernels if no cache has them
@pytest.mark.parametrize(("family", "row"), ROWS)
def test_a_hard_problem_agrees_with_the_oracle(family: str, row: str) -> None:
    FAMILIES[family].run(row)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", USUAL, ids=USUAL)
def test_a_variant_agrees_with_the_oracle(name: str) -> None:
    family, variant = GRID[name]
    FAMILIES[family].run_variant(variant, thorough=False)


@pytest.mark.sweep
@pytest.mark.usefixtures("fused_or_not")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", GRID, ids=list(GRID))
def test_the_whole_grid_agrees_with_the_oracle(name: str) -> None:
    family, variant = GRID[name]
    FAMILIES[family].run_variant(variant, thorough=True)
