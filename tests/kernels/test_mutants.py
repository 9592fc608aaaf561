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
