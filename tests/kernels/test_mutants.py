"""The seeded bugs that the mutation runs want to see caught: each still has a place to be seeded at."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from mutation import (
    append_mutants,
    asm_mutants,
    backward_mutants,
    backward_sm90_mutants,
    cascade_mutants,
    decode_mutants,
    decode_simple_mutants,
    decode_sm90_mutants,
    forward_wide_mutants,
    host_mutants,
    workers_mutants,
)
from mutation import forward_mutants as mutants
from mutation import hopper_fp8_mutants as sm90_fp8_mutants
from mutation import hopper_mutants as sm90_mutants
from mutation.drawn import OPERATORS, changes, draw
from mutation.forward_mutants import Mutant
from support.service import KERNELS_CU, REPOSITORY

LISTS: dict[str, tuple[Mutant, ...]] = {
    "forward": mutants.MUTANTS,
    "forward_wide": forward_wide_mutants.MUTANTS,
    "backward": backward_mutants.MUTANTS,
    "backward_sm90": backward_sm90_mutants.MUTANTS,
    "decode": decode_mutants.DECODE_MUTANTS,
    "decode_simple": decode_simple_mutants.MUTANTS,
    "decode_sm90": decode_sm90_mutants.MUTANTS,
    "append": append_mutants.MUTANTS,
    "asm": asm_mutants.MUTANTS,
    "hopper": sm90_mutants.MUTANTS,
    "hopper fp8": sm90_fp8_mutants.MUTANTS,
}


@pytest.mark.parametrize("kernels", LISTS)
def test_every_bug_changes_the_text_that_it_names(kernels: str) -> None:
    found = LISTS[kernels]
    lost = [bug.name for bug in found if bug.old not in (KERNELS_CU / bug.file).read_text() or bug.old == bug.new]
    assert lost == []
    assert len({(bug.kernel, bug.name) for bug in found}) == len(found)


@pytest.mark.parametrize(
    "found",
    [cascade_mutants.MUTANTS, host_mutants.MUTANTS, workers_mutants.MUTANTS],
    ids=["cascade", "host", "workers"],
)
def test_every_fault_changes_the_module_that_it_names(found: Sequence[Mutant]) -> None:
    lost = [bug.name for bug in found if bug.old not in (REPOSITORY / bug.file).read_text() or bug.old == bug.new]
    assert lost == []
    assert len({(bug.kernel, bug.name) for bug in found}) == len(found)


CODE = """\
// a < b
#if WIDE < 3
  if (row < p.rows && lane == 0) {
    sum += at[row * 4 + c] - bias;  // a + b
    ptx::cp_async_wait(0);
    offset = static_cast<int64_t>(row) * stride;
    keys.load(stage, wide ? parity : 1);
"""
CHANGED = (
    "if (row <= p.rows && lane == 0) {",
    "if (row < p.rows || lane == 0) {",
    "if (row < p.rows && lane != 0) {",
    "if (row < p.rows && lane == 1) {",
    "if (true) {",
    "if (false) {",
    "sum = at[row * 4 + c] - bias;",
    "sum += at[(row * 4 + c) + 1] - bias;",
    "sum += at[row + 4 + c] - bias;",
    "sum += at[row * 5 + c] - bias;",
    "sum += at[row * 4] - bias;",
    "sum += at[row * 4 + c];",
    "offset = static_cast<int32_t>(row) * stride;",
    "offset = static_cast<int64_t>(row);",
    "keys.load((stage ^ 1), wide ? parity : 1);",
    "keys.load(stage, !(wide) ? parity : 1);",
    ";",
)

RARE = {"a stage or parity is the other", "a number is cut to 32 bits"}


def test_bugs_are_drawn_from_code_and_from_nothing_else() -> None:
    drawn = {(line, new.strip()) for _, line, new in changes(CODE)}
    assert {new for _, new in drawn} >= set(CHANGED)
    assert {line for line, _ in drawn} == {2, 3, 4, 5, 6}


@pytest.mark.parametrize("kernels", ["forward", "backward_sm90", "decode"])
def test_a_drawn_bug_changes_one_place_of_its_kernel(kernels: str) -> None:
    found = draw(LISTS[kernels], 300, seed=1)
    assert found == draw(LISTS[kernels], 300, seed=1) != draw(LISTS[kernels], 300, seed=2)
    assert {bug.name.partition(":")[0] for bug in found} >= set(OPERATORS) - RARE
    for bug in found:
        assert (KERNELS_CU / bug.file).read_text().count(bug.old) == 1
        assert bug.old != bug.new
        assert bug.probes
