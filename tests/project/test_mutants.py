"""`scripts/mutants` draws bugs in code alone, in every family, and the same ones for a seed."""

from __future__ import annotations

import pytest
from inside.compiling import asset_texts
from mutation.drawn import ASM_OPERATORS, OPERATORS, changes, draw
from mutation.kernels import NAMES, files_of

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
ASM = """\
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 4;\\nadd.u32 %0, %0, 8;" ::"r"(d) : "memory");
"""
ASM_CHANGED = (
    'asm volatile("cp.ca.shared.global.L2::128B [%0], [%1], 4;',
    'asm volatile("cp.async.ca.shared.global [%0], [%1], 4;',
    "[%1], [%1], 4;",
    "[%0], [%1 + 4], 4;",
    "[%0], [%1], 5;",
    'asm("cp.async',
    'asm volatile("\\nadd.u32',
    '::"r"(d));',
)


def test_bugs_are_drawn_from_code_and_from_nothing_else() -> None:
    drawn = {(line, new.strip()) for _, line, new in changes(CODE)}
    assert {new for _, new in drawn} >= set(CHANGED)
    assert {line for line, _ in drawn} == {2, 3, 4, 5, 6}


def test_bugs_are_drawn_from_the_text_of_instructions() -> None:
    drawn = [new for _, _, new in changes(ASM, ASM_OPERATORS)]
    assert [changed for changed in ASM_CHANGED if not any(changed in new for new in drawn)] == []


@pytest.mark.parametrize("family", NAMES)
def test_a_drawn_bug_changes_one_line_of_a_kernel_of_its_family(family: str) -> None:
    operators, files = ASM_OPERATORS if family == "asm" else OPERATORS, files_of(family)
    found = draw(files, operators, 20, seed=1)
    if family == NAMES[0]:
        assert found == draw(files, operators, 20, seed=1) != draw(files, operators, 20, seed=2)
    assert len(set(found)) == len(found)
    for bug in found:
        before = asset_texts()[bug.file].split("\n")
        after = bug.seeded(asset_texts()[bug.file]).split("\n")
        assert [number for number, pair in enumerate(zip(before, after, strict=True)) if len(set(pair)) == 2] == [
            bug.number
        ]
