"""What ptxas makes of forward_mma, which needs no GPU: registers, spills, shared memory and tensor-core instructions.

scripts/gate forward         every variant below on every architecture; writes build/reports/gate_forward.md
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
from emulated.forward import key_of, ml_dtype, problem_of
from mutation.forward_mutants import DEFECTS, FUSED_CORRECTION, Mutant
from support.exponents import fused_corrections
from support.gate import (
    ARCHS,
    MMA_SHAPES,
    Code,
    MmaVariant,
    code_faults,
    code_of,
    failing,
    register_limit,
    sample_of,
    tiles_missed,
    with_bug,
    write_page,
    wrong,
)

from gpu_actors import DispatchKey
from gpu_actors.compiling.compiler import Compiler
from gpu_actors.kernels.occupancy import shared_mem_limit
from gpu_actors.kernels.support import ELEMENTS, capability
from gpu_actors.kernels.tiles import TILES
from gpu_actors.kernels.variants import kernel_source

KERNEL = "forward_mma"

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal varlen": {"causal": True, "layout": "varlen"},
    "window": {"window_size": (9, 9)},
    "window sinks": {"causal": True, "window_size": (9, 0), "sink_tokens": 4, "sinks": True, "layout": "varlen"},
    "softcap": {"causal": True, "softcap": 20.0},
    "alibi": {"causal": True, "alibi": "heads"},
    "bias": {"bias": ("float32", True, True)},
    "dropout": {"causal": True, "dropout_p": 0.1},
}
FEW = ("full", "causal varlen", "window sinks", "dropout")
# Checked by every test run; the rest is the sweep's.
SAMPLE = {
    "sm_80": (("float16", 64, "causal"), ("bfloat16", 128, "causal varlen"), ("float32", 256, "full")),
    "sm_86": (("float16", 256, "window sinks"), ("bfloat16", 40, "dropout")),
    "sm_89": (("bfloat16", 128, "causal varlen"),),
    "sm_90a": (("bfloat16", 128, "window sinks"), ("float16", 256, "causal")),
    "sm_100a": (("bfloat16", 128, "causal"),),
    "sm_120a": (("float16", 64, "bias"),),
}


# Every option with the usual head dims, a few with the others.
VARIANTS = tuple(
    MmaVariant(arch, shape, option)
    for arch in ARCHS
    for shape in MMA_SHAPES
    for option in (OPTIONS if shape in MMA_SHAPES[:3] else FEW)
)


class Finding(NamedTuple):
    """What became of a variant. exponents: what is wrong with the softmax's exponentials."""

    key: DispatchKey
    code: Code
    shared: int
    threads: int
    blocks: int
    expected: int
    exponents: list[str]

    @property
    def tensor(self) -> int | None:
        return self.code.count(r"\bHMMA\.")


def key_of_variant(variant: MmaVariant) -> DispatchKey:
    dtype, compute, dim, dim_v = variant.shape
    q, v = (np.zeros((1, 64, 2, width), ml_dtype(dtype)) for width in (dim, dim_v))
    problem = dataclasses.replace(problem_of(q, q, v, compute=compute), **OPTIONS[variant.option])
    return key_of(problem, variant.arch, KERNEL)


def expected_instructions(macros: dict[str, str]) -> int:
    """HMMA of both loops. The sum over head_dim is unrolled by two steps and keeps a remainder."""
    number = {name: int(value) for name, value in macros.items() if value.isdigit()}
    itemsize = 4 if macros["ELEMENT"] == "float" else 2
    row_blocks = number["BLOCK_M"] // (16 * number["WARPS"])
    steps = -(-number["HEAD_DIM"] * itemsize // 32)
    unrolled = steps if steps <= 2 else 2 + steps % 2
    keys = number["BLOCK_N"] // 8 * unrolled
    values = number["HEAD_DIM_V"] // 8 * number["BLOCK_N"] // (32 // itemsize)
    return 2 * row_blocks * (keys + values)


def exponent_faults(text: str, macros: dict[str, str]) -> list[str]:
    """In both loops, a lane has a quarter of the keys of two rows of each 16. What rounding took off bases follows."""
    keys, row_blocks = int(macros["BLOCK_N"]), int(macros["BLOCK_M"]) // (16 * int(macros["WARPS"]))
    return fused_corrections(text, weights=row_blocks * (keys + 2), corrections=4 * row_blocks)


@functools.cache
def examine(variant: MmaVariant, mutant: Mutant | None = None) -> Finding:
    """mutant: a bug to seed, whose file is a header."""
    key = key_of_variant(variant)
    source = kernel_source(key)
    if mutant is not None:
        source = with_bug(source, mutant.file, mutant.old, mutant.new)
    code, macros = code_of(source, KERNEL), dict(source.macros)
    tile = (int(macros["BLOCK_M"]), int(macros["BLOCK_N"]), int(macros["STAGES"]), int(macros["WARPS"]))
    return Finding(
        key=key,
        code=code,
        shared=int(macros["SHARED_BYTES"]),
        threads=32 * tile[3],
        blocks=max(row.blocks for row in TILES if row.kernel == KERNEL and row.tile == tile),
        expected=expected_instructions(macros),
        exponents=[] if code.text is None else exponent_faults(code.text, macros),
    )


def faults(found: Finding) -> list[str]:
    """What the gate holds against a variant."""
    shared, limit = found.blocks * found.shared, shared_mem_limit(capability(found.key.arch))
    checks = {
        f"{found.blocks} x {found.shared} bytes of shared memory of {limit}": shared > limit,
        f"{found.tensor} HMMA instead of {found.expected}": found.tensor not in (None, found.expected),
    }
    return code_faults(found.code, register_limit(found.threads, found.blocks)) + wrong(checks) + found.exponents


@pytest.mark.parametrize("arch", ARCHS)
def test_a_sample_of_the_variants_passes_the_gate(arch):
    assert failing(examine, faults, sample_of(VARIANTS, arch, SAMPLE[arch])) == {}


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_variant_passes_the_gate(arch):
    assert failing(examine, faults, [v for v in VARIANTS if v.arch == arch]) == {}


def test_the_gate_counts_what_it_says():
    """A tile of too many accumulators spills, and the gate sees it."""
    source = kernel_source(key_of_variant(MmaVariant("sm_80", ("float16", None, 256, 256), "full")))
    macros = {**source.macros, "WARPS": "4", "BLOCK_M": "128", "BLOCK_N": "32"}
    resources = Compiler().compile(dataclasses.replace(source, macros=macros)).resources[KERNEL]
    assert resources.spill_bytes > 0
    assert resources.stack_bytes > 0


def test_the_gate_sees_a_correction_of_a_fused_product():
    variant = next(v for v in VARIANTS if v.arch == "sm_80" and (v.shape[2], v.option) == (64, "causal"))
    mutant = next(mutant for mutant in DEFECTS if (mutant.old, mutant.new) == FUSED_CORRECTION)
    assert faults(examine(variant)) == []
    assert [fault.split(" ")[0] for fault in faults(examine(variant, mutant))] == ["exponentials"] * 2


def test_every_row_of_the_tile_table_is_among_the_variants():
    assert tiles_missed(KERNEL, (kernel_source(key_of_variant(variant)) for variant in VARIANTS)) == set()
    assert {key.dtype for key in map(key_of_variant, VARIANTS)} <= set(ELEMENTS)


def judge(variant: MmaVariant) -> tuple[str, list[str]]:
    found = examine(variant)
    registers, blocks = found.code.resources.registers, f"{found.blocks} x {found.threads}"
    return f"{registers} | {found.shared} | {blocks} | {found.tensor}", faults(found)


def main() -> int:
    return write_page(VARIANTS, judge, "forward", ("registers", "shared memory, bytes", "blocks x threads", "HMMA"))


if __name__ == "__main__":
    sys.exit(main())
