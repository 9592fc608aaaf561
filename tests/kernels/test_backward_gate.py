"""What ptxas makes of the backward kernels, which needs no GPU: registers, spills, shared memory, tensor instructions.

scripts/gate backward         every variant below; writes build/reports/gate_backward.md
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
from emulated.backward import KERNEL, backward_problem_of
from emulated.forward import key_of, ml_dtype
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
    write_page,
    wrong,
)

from benchmarks.sass import main_step
from gpu_actors import DispatchKey
from gpu_actors.compiling.compiler import Compiler
from gpu_actors.kernels.backward.launch import BACKWARD_MMA
from gpu_actors.kernels.occupancy import shared_mem_limit
from gpu_actors.kernels.support import capability
from gpu_actors.kernels.tiles import tile_of
from gpu_actors.kernels.variants import kernel_source

# FlashAttention-2's kernel for sm_80 has 1,003 and 144 at head dim 128, as in torch 2.14's wheel.
MOST_INSTRUCTIONS, MOST_LOADS = 1010, 144

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window sinks": {"causal": True, "window_size": (9, 0), "sink_tokens": 4, "sinks": True, "layout": "varlen"},
    "dropout": {"causal": True, "dropout_p": 0.1, "layout": "varlen"},
    "bias": {"bias": ("float32", True, True), "softcap": 20.0, "deterministic": True},
    "alibi": {"causal": True, "alibi": "heads", "deterministic": True},
}
FEW = ("dropout", "bias")
# Architectures with shared memory and reductions of their own; what the others compile is nearly the same.
MAIN_ARCHS = ("sm_80", "sm_86", "sm_90a")
# Checked by every test run; the rest is the sweep's.
SAMPLE = {
    "sm_80": (("bfloat16", 128, "causal"), ("float32", 256, "dropout")),
    "sm_86": (("float16", 256, "bias"),),
    "sm_90a": (("bfloat16", 128, "window sinks"),),
}


def options_of(arch: str, shape: tuple[str, str | None, int, int]) -> tuple[str, ...]:
    """Every option with the usual head dims, a few with the others, one on the lesser architectures."""
    usual = shape in MMA_SHAPES[:2]
    if arch not in MAIN_ARCHS:
        return ("causal",) if usual else ()
    return tuple(OPTIONS) if usual else FEW


VARIANTS = tuple(
    MmaVariant(arch, shape, option) for arch in ARCHS for shape in MMA_SHAPES for option in options_of(arch, shape)
)


class Finding(NamedTuple):
    """What became of a variant. expected: the fewest and the most tensor-core instructions."""

    key: DispatchKey
    code: Code
    shared: int
    threads: int
    expected: tuple[int, int]

    @property
    def tensor(self) -> int | None:
        return self.code.count(r"\bHMMA\.")

    @property
    def step(self) -> tuple[int, int]:
        """Instructions, and LDSM among them, of a step and warp without a mask; 0 where the gate has no limit."""
        tile = tile_of(self.key)
        wide = self.key.head_dim == self.key.head_dim_v == 128 and tile.block_m == 64
        if self.code.text is None or not wide or self.key.mask != "full" or not self.key.scale_only:
            return 0, 0
        step = main_step(self.code.text, tile.block_m * tile.block_n * 5 * 128 / tile.warps)
        assert step is not None
        return step.instructions, step.opcodes["LDSM"]


def key_of_variant(variant: MmaVariant) -> DispatchKey:
    dtype, compute, dim, dim_v = variant.shape
    q, v = (np.zeros((1, 64, 2, width), ml_dtype(dtype)) for width in (dim, dim_v))
    problem = dataclasses.replace(backward_problem_of(q, q, v, compute=compute), **OPTIONS[variant.option])
    return key_of(problem, variant.arch, KERNEL)


def unrolled(steps: int, by: int) -> int:
    """How many bodies a loop of so many steps has: those side by side, and a remainder."""
    return steps if steps <= by else by + steps % by


def column_pairs(chunk: int, dim: int, warps: int) -> int:
    """Pairs of blocks of 8 columns that a warp has: `Columns` of kernels_cu/mma/shares.cuh."""
    chunks = -(-dim // chunk // 2) * 2
    pair = 16 // chunk
    group = max(next(factor for factor in (8, 4, 2) if chunks % factor == 0), pair)
    a_group = group // pair
    parts = a_group if warps % a_group == 0 else 2 if warps % 2 == 0 else 1
    groups, stride = -(-chunks // group), warps // parts
    return -(-groups // stride) * (a_group // parts)


def expected_instructions(macros: dict[str, str]) -> tuple[int, int]:
    """(fewest, most) HMMA of the code: one loop over tiles, for those with a mask and for those without one."""
    number = {name: int(value) for name, value in macros.items() if value.isdigit()}
    itemsize = 4 if macros["ELEMENT"] == "float" else 2
    m, n, warps = number["BLOCK_M"], number["BLOCK_N"], number["WARPS"]
    dims, chunk, step = (number["HEAD_DIM"], number["HEAD_DIM_V"]), 16 // itemsize, 32 // itemsize
    tile = number["WARP_TILE"]
    key_warps = min(warps, n // tile)
    sharing, key_rows = warps // key_warps, n // (16 * key_warps)
    split = sharing > 1 and m % (16 * sharing) == 0
    pairs = [column_pairs(chunk, dim, sharing) for dim in dims]
    queries = m // sharing if split else m
    options = ("SOFTCAP", "ALIBI", "BIAS_ELEMENT", "DROPOUT", "WINDOW")
    roomy = not any(name in macros for name in options)
    wide = 8 * key_rows * sum(pairs) > 96
    limit = 64 if not wide else 32 if roomy else 16
    block = min(queries, limit)
    paired = key_rows == 2
    # Of a product over columns 4 steps are side by side where there is room, over queries all, over keys 2 or 4.
    bodies = [unrolled(-(-dim * itemsize // 32), 4) if paired and roomy else 1 for dim in dims]
    by = 2 if not paired or ("VARLEN" in number and number["REDUCE_WIDTH"] == 4) else 4
    scores = key_rows * block // 8 * sum(bodies)
    steps = m // step if paired else 1 if split else block // step
    most = [key_rows * steps * 2 * count for count in pairs]
    at_once = min(column_pairs(chunk, dims[0], warps // (m // tile)), 4 if not wide or roomy else 2)
    keys = n // step
    gradient = unrolled(keys, by) * 2 * at_once * tile // 16
    remainder = (
        2 * at_once if not paired and keys > 2 and keys % 2 else 0
    )  # a body of its own, or a way out of the loop's middle
    hides = "CAUSAL" in number or "WINDOW" in number
    poison = key_rows * unrolled(-(-dims[0] * itemsize // 32), 2) if hides else 0
    total = scores + sum(most) + gradient + poison
    return total - remainder, total


@functools.cache
def examine(variant: MmaVariant) -> Finding:
    key = key_of_variant(variant)
    source = kernel_source(key)
    macros = dict(source.macros)
    return Finding(
        key=key,
        code=code_of(source, KERNEL),
        shared=int(macros["SHARED_BYTES"]),
        threads=32 * int(macros["WARPS"]),
        expected=expected_instructions(macros),
    )


def faults(found: Finding) -> list[str]:
    """What the gate holds against a variant."""
    tensor, (fewest, most) = found.tensor, found.expected
    limit = shared_mem_limit(capability(found.key.arch))
    instructions, loads = found.step
    checks = {
        f"{instructions} instructions a step and warp, more than {MOST_INSTRUCTIONS}": instructions > MOST_INSTRUCTIONS,
        f"{loads} loads of operands a step and warp, more than {MOST_LOADS}": loads > MOST_LOADS,
        f"{found.shared} bytes of shared memory of {limit}": found.shared > limit,
        f"{tensor} HMMA instead of {fewest} to {most}": tensor is not None and not fewest <= tensor <= most,
    }
    return code_faults(found.code, register_limit(found.threads)) + wrong(checks)


@pytest.mark.parametrize("arch", SAMPLE)
def test_a_sample_of_the_variants_passes_the_gate(arch):
    assert failing(examine, faults, sample_of(VARIANTS, arch, SAMPLE[arch])) == {}


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_variant_passes_the_gate(arch):
    assert failing(examine, faults, [v for v in VARIANTS if v.arch == arch]) == {}


@pytest.mark.parametrize("option", ["full", "bias"])
@pytest.mark.parametrize("name", BACKWARD_MMA.companions)
def test_the_kernels_before_and_after_are_clean_as_well(name, option):
    key = key_of_variant(MmaVariant("sm_80", ("bfloat16", None, 128, 128), option))
    resources = Compiler().compile(kernel_source(dataclasses.replace(key, kernel=name))).resources[name]
    assert (resources.spill_bytes, resources.stack_bytes) == (0, 0)


def test_the_gate_counts_what_it_says():
    """A tile of too many accumulators spills, and the gate sees it."""
    source = kernel_source(key_of_variant(MmaVariant("sm_80", ("float16", None, 256, 256), "causal")))
    wide = {"BLOCK_M": "32", "BLOCK_N": "64", "WARPS": "4", "SHARED_BYTES": str(135696), "DQ_FLOATS": str(16 * 4 * 128)}
    resources = Compiler().compile(dataclasses.replace(source, macros={**source.macros, **wide})).resources[KERNEL]
    assert resources.spill_bytes > 0
    assert resources.stack_bytes > 0


def test_every_row_of_the_tile_table_is_among_the_variants():
    assert tiles_missed(KERNEL, (kernel_source(key_of_variant(variant)) for variant in VARIANTS)) == set()


def judge(variant: MmaVariant) -> tuple[str, list[str]]:
    found = examine(variant)
    return f"{found.code.resources.registers} | {found.shared} | {found.threads} | {found.tensor}", faults(found)


def main() -> int:
    return write_page(VARIANTS, judge, "backward", ("registers", "shared memory, bytes", "threads", "HMMA"))


if __name__ == "__main__":
    sys.exit(main())
