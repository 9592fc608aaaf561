"""Matrices of ldmatrix, stmatrix and movmatrix: the kernels' side against the second reading."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isa import matrices
from kernel_runs import KernelRun, Runner, pointers
from second_reading import COPIES_FILE, FORMS, ROWS_BYTES, Case, bytes_of, load_case, store_case

pytestmark = pytest.mark.timeout(300)  # the first test of a process builds the module of all

UNITS = ROWS_BYTES // 16

rows_of_lanes = st.lists(st.integers(0, UNITS - 1).map(lambda unit: 16 * unit), min_size=32, max_size=32)
seeds = st.integers(0, 1 << 32)


def check(runner: Runner, case: Case) -> None:
    for result in runner(case.run):
        result.check(**case.expected)


@settings(max_examples=8, deadline=None)
@given(seed=seeds, rows=rows_of_lanes)
def test_ldmatrix_gives_what_the_isa_says_of_any_rows(quick_runner: Runner, seed: int, rows: list[int]) -> None:
    check(quick_runner, load_case(seed, rows))


@settings(max_examples=8, deadline=None)
@given(seed=seeds, rows=st.permutations([16 * unit for unit in range(UNITS)]))
def test_stmatrix_puts_what_the_isa_says_at_any_rows(quick_runner: Runner, seed: int, rows: list[int]) -> None:
    for number in range(len(FORMS)):
        check(quick_runner, store_case(seed, rows[:32], number))


def test_movmatrix_transposes_as_the_isa_says(quick_runner: Runner) -> None:
    memory = bytes_of(0, 512)
    arrays = {"in": memory, "out": np.zeros((15, 32), np.uint32)}
    fourth = matrices.loaded(memory, 16 * np.arange(32), 4)[:, 3]
    expected = matrices.moved(fourth)
    assert (expected == matrices.loaded(memory, 16 * np.arange(32), 4, transposed=True)[:, 3]).all()
    run = KernelRun(COPIES_FILE, "matrix_loads", arrays, pointers("in", "out"), shared_bytes=512)
    for result in quick_runner(run):
        np.testing.assert_array_equal(result["out"][14], expected)
