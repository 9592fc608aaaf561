"""Faults that the gate table must see: seeded into kernels, or invented for its limits."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
from gates import decode
from gates.rows import COMPILERS, Found, Limit, Plan, at_most, between, exactly, examine, faults
from gates.table import ROWS
from inside.compiling import Compiler
from support.gate import Code, with_bug

from gpu_actors import KernelResources, KernelSource

# Old and new text of mma/softmax.cuh: an exponent that is a product less a base, which compilers fuse into one.
FUSED_CORRECTION = ("ptx::ex2(before - base)", "ptx::ex2(last * factor - (base + WEIGHT_EXPONENT))")


def test_a_tile_that_is_too_large_spills() -> None:
    """The tile has more scores than a warp has registers for."""
    plan = decode.plan(decode.Variant("sm_80", decode.SHAPES[9], 64, "paged"))
    # Shared memory of q, and stages * keys * (K and V) * bytes of a row of 40.
    large = {"BLOCK_N": "512", "STAGES": "2", "SHARED_BYTES": str(64 * 96 + 2 * 512 * 2 * 96)}
    source = dataclasses.replace(plan.source, macros={**plan.source.macros, **large})
    resources = Compiler().compile(source).resources[plan.entry]
    assert resources.spill_bytes > 0
    assert resources.stack_bytes > 0


@pytest.mark.parametrize(
    ("row", "faults_seen"),
    [
        ("forward sm_80 float16 64 causal", 2),
        pytest.param(
            "decode sm_80 decode_mma bfloat16 over float8_e4m3fn 256, 16 rows, paged", 1, marks=pytest.mark.sweep
        ),
    ],
)
def test_a_correction_of_a_fused_product_is_all_that_is_seen(row: str, faults_seen: int) -> None:
    """The unchanged rows have no fault, which the default run checks."""
    assert ROWS[row].sampled
    change = functools.partial(with_bug, file="mma/softmax.cuh", old=FUSED_CORRECTION[0], new=FUSED_CORRECTION[1])
    seen = [fault.split(" ")[0] for fault in faults(examine(ROWS[row], change))]
    assert seen == ["exponentials"] * faults_seen


# Bugs of the Hopper kernels, and a word of the fault that must be among those seen

FORWARD_SEEDS = {
    # As the comment in `mainloop_step` says: without the wait between, ptxas waits for O before the exponentials.
    "overlap": (
        "forward_sm90/forward_sm90.cu",
        "if (more) wait_for_keys();\n  ptx::wgmma_wait<0>",
        "ptx::wgmma_wait<0>",
    ),
    "C75": ("forward_sm90/forward_sm90.cu", "  ptx::wgmma_fence();  // without it, ptxas puts one in (C7519)\n", ""),
    # A tile index that might differ between lanes, as far as the compiler knows.
    "uniform": ("forward_sm90/schedule.cuh", "int tile = ptx::warp_uniform(", "int tile = int(threadIdx.x >> 20) + ("),
    "HGMMA": ("forward_sm90/consumer.cuh", "n < BLOCK_N / STEP; n++", "n < BLOCK_N / STEP - 1; n++"),
    "fused products": ("mma/softmax.cuh", *FUSED_CORRECTION),
}
BACKWARD_SEEDS = {
    "exponentials": ("backward_sm90/backward_sm90.cu", "wgmma_wait<DP_LATER ? 0 : 1>", "wgmma_wait<0>"),
    "HGMMA": ("backward_sm90/consumer.cuh", "n < BLOCK_N / STEP; n++", "n < BLOCK_N / STEP - 1; n++"),
    "instructions": (
        "backward_sm90/scores.cuh",
        "x = ptx::ex2(x * ",
        "for (int i = 0; i < 9; i++) x = x * 1.5f;\n      x = ptx::ex2(x * ",
    ),
}
DECODE_SEEDS = {
    "HGMMA": ("decode_sm90/consumer.cuh", "n < DIM / STEP; n++", "n < DIM / STEP - 1; n++"),
    "instructions": (
        "decode_sm90/softmax.cuh",
        "x = ptx::ex2(x * ",
        "for (int i = 0; i < 9; i++) x = x * 1.5f;\n      x = ptx::ex2(x * ",
    ),
}
SEEDED = {
    "forward_sm90 bfloat16 128 causal": FORWARD_SEEDS,
    "backward_sm90 bfloat16 128 full": BACKWARD_SEEDS,
    "decode_sm90 bfloat16 128, 128 rows, paged": DECODE_SEEDS,
}
# Every test run checks these; the sweep checks the rest.
WORST = (("forward_sm90", "overlap"), ("backward_sm90", "HGMMA"))
SEEDS = [
    pytest.param(row, fault, marks=() if (ROWS[row].family, fault) in WORST else pytest.mark.sweep)
    for row, seeds in SEEDED.items()
    for fault in seeds
    # Of the compilers here, only nvcc 13.0 inserts a missing fence.
    if fault != "C75" or len(COMPILERS) > 1
]


@pytest.mark.parametrize(("row", "fault"), SEEDS)
def test_a_bug_of_a_hopper_kernel_is_seen(row: str, fault: str) -> None:
    """At least one compiler of its rows shows the fault."""
    file, old, new = SEEDED[row][fault]
    change = functools.partial(with_bug, file=file, old=old, new=new)
    rows = [ROWS[name] for name in (row, f"{row} by nvcc") if name in ROWS]
    seen: list[str] = []
    for each in rows:
        seen += faults(examine(each, change))
        if any(fault in text for text in seen):
            return
    pytest.fail(str(seen))


# Checks that compile no kernel

CLEAN = KernelResources(registers=128, spill_bytes=0, stack_bytes=0, shared_bytes=0)
PLAN = Plan(KernelSource("none", 'extern "C" __global__ void none() {}', ("none",)), "none", 128, {}, {}, lambda _: {})


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        (Code(CLEAN, (), "FADD R1, R2, R3;"), []),
        (Code(CLEAN._replace(registers=129), (), ""), ["129 registers of 128"]),
        (Code(CLEAN._replace(registers=0), (), ""), ["0 registers of 128"]),
        (Code(CLEAN._replace(spill_bytes=4), (), ""), ["4 bytes spilled"]),
        (Code(CLEAN._replace(stack_bytes=8), (), ""), ["8 bytes of stack"]),
        (Code(CLEAN, ("C7510",), ""), ["notes ('C7510',)"]),
        (Code(CLEAN, (), "LDL R1, [R2];\nSTL [R2], R1;"), ["2 accesses to local memory"]),
    ],
)
def test_what_is_held_against_any_kernel(code: Code, seen: list[str]) -> None:
    assert faults(Found(PLAN, code, {}, 0.0)) == seen


@pytest.mark.parametrize(
    ("limit", "within", "outside", "text"),
    [
        (exactly(8, 12), [8, 12], [7, 10, 13], "8 or 12"),
        (at_most(8), [-1, 0, 8], [8.001, 9], "at most 8"),
        (between(8, 12), [8, 10, 12], [7, 13, math.nan], "at least 8 and at most 12"),
    ],
)
def test_a_figure_outside_its_limit_is_a_fault(
    limit: Limit, within: list[float], outside: list[float], text: str
) -> None:
    plan, code = PLAN._replace(limits={"HMMA": limit}), Code(CLEAN, (), "")
    for figure in within:
        assert faults(Found(plan, code, {"HMMA": figure}, 0.0)) == []
    for figure in outside:
        assert faults(Found(plan, code, {"HMMA": figure}, 0.0)) == [f"HMMA: {figure:g} instead of {text}"]
    assert faults(Found(plan, code, {"other": within[0]}, 0.0)) == [f"HMMA: nan instead of {text}"]
