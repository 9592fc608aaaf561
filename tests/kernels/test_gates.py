"""ptxas's results for every kernel, which need no GPU: the rows of the gate table, tests/lib/gates/table.py."""

from __future__ import annotations

import pytest
from gates.forward import MMA_SHAPES
from gates.rows import Family, Row, examine, faults, tiles_missed
from gates.table import FAMILIES, ROWS

from gpu_actors.kernels.support import ELEMENTS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test per row. A run without sweeps gets only the sampled rows: each worker would make and drop 2,000 others."""
    if "row" in metafunc.fixturenames:
        sampled_only = "not sweep" in metafunc.config.option.markexpr
        rows = [row for row in ROWS.values() if row.sampled or not sampled_only]
        marked = [row if row.sampled else pytest.param(row, marks=pytest.mark.sweep) for row in rows]
        metafunc.parametrize("row", marked, ids=str)


def test_ptxas_stays_within_the_limits(row: Row) -> None:
    assert faults(examine(row)) == []


@pytest.mark.parametrize("family", [family for family in FAMILIES.values() if family.tiles], ids=lambda each: each.name)
def test_every_row_of_the_tile_table_is_among_the_variants(family: Family) -> None:
    assert tiles_missed(family.tiles, family.rows) == set()


def test_the_tensor_core_kernels_multiply_only_dtypes_that_there_are() -> None:
    assert {shape[0] for shape in MMA_SHAPES} <= set(ELEMENTS)
