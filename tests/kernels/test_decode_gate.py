"""What ptxas makes of the decode kernels, which needs no GPU: registers, spills, shared memory, instructions.

scripts/gate decode         every variant below on every architecture; writes build/reports/gate_decode.md
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
from emulated import decode as emulated_decode
from mutation.decode_mutants import DECODE_DEFECTS
from mutation.forward_mutants import FUSED_CORRECTION, Mutant
from support.exponents import fused_corrections
from support.gate import ARCHS, Code, code_faults, code_of, register_limit, with_bug, write_page, wrong

from gpu_actors import DispatchKey
from gpu_actors.bench.plan import problem_of
from gpu_actors.compiling.compiler import Compiler
from gpu_actors.kernels.decode.simple import SIMPLE, SIMPLE_COMBINE
from gpu_actors.kernels.decode.variant import COMBINE, DECODE, PLAN, decode_tile
from gpu_actors.kernels.occupancy import occupancy, shared_a_multiprocessor
from gpu_actors.kernels.support import ELEMENTS
from gpu_actors.kernels.variants import kernel_source

HMMA = r"\bHMMA\."
BASE = dataclasses.replace(problem_of(np.full(4, 100, np.int32)), return_lse=True)

OPTIONS: dict[str, dict[str, Any]] = {
    "paged": {},
    "paged varlen": {"varlen_q": True},
    "paged tree": {"causal": False, "tree_mask": True},
    "paged window sinks": {"window_size": (9, -1), "sink_tokens": 4, "sinks": True},
    "paged softcap": {"softcap": 20.0},
    "paged alibi": {"alibi": "batch"},
    "pointers": {"layout": "pointers", "page_size": 0, "causal": False},
    "cache": {"layout": "cache", "page_size": 0},
    "paged single": {"page_size": 1},
    "paged leftpad": {"cache_leftpad": True},
    "cache places": {"layout": "cache", "page_size": 0, "cache_batch_idx": True, "cache_leftpad": True},
    "pointers apart": {"layout": "pointers", "page_size": 0, "causal": False, "own_layouts": True},
}
FEW = ((16, "paged"), (64, "paged window sinks"), (16, "pointers"))
FP8 = "float8_e4m3fn"
# (q's dtype, cache's dtype, head_dim, head_dim_v)
SHAPES = (
    ("bfloat16", "bfloat16", 128, 128),
    ("bfloat16", FP8, 128, 128),
    ("float16", "float16", 64, 64),
    ("float16", "float16", 256, 256),
    ("bfloat16", FP8, 256, 256),
    ("float16", FP8, 64, 64),
    ("bfloat16", "float8_e5m2", 80, 80),
    ("bfloat16", "bfloat16", 80, 80),
    ("bfloat16", "bfloat16", 192, 128),
    ("float16", "float16", 40, 40),
    (FP8, FP8, 128, 128),
    (FP8, FP8, 256, 256),
    ("float8_e5m2", "float8_e5m2", 64, 64),
)
# Of decode_simple, with the rows of its tiles: every dtype, the widest heads, and head dims of no whole chunks.
ALL_SCORES: dict[str, Any] = {"causal": True, "softcap": 20.0, "alibi": "batch", "bias": ("float32", False, False)}
ALL_SCORES |= {"window_size": (9, -1), "sink_tokens": 4, "sinks": True}
SIMPLE_OPTIONS: dict[str, dict[str, Any]] = {
    **OPTIONS,
    "paged scores": ALL_SCORES,
    "float64 scores": {**ALL_SCORES, "bias": ("float64", False, False)},
    "latent": {"latent": True, "layout": "cache", "page_size": 0},
}
SIMPLE_SHAPES = (
    (("float32", "float32", 128, 128), (8, 32), "paged scores"),
    (("float32", "float32", 512, 512), (8, 16), "paged scores"),
    (("float64", "float64", 128, 128), (8, 16), "float64 scores"),
    (("float64", "float64", 256, 256), (8, 16), "float64 scores"),
    (("float64", "float64", 512, 512), (8,), "float64 scores"),
    (("float32", "float32", 20, 20), (8, 32), "pointers apart"),
    (("bfloat16", "bfloat16", 20, 20), (8, 32), "paged tree"),
    (("float16", FP8, 36, 36), (8,), "paged single"),
    (("float32", "float32", 576, 512), (8, 16), "latent"),
    (("float64", "float64", 576, 512), (4,), "latent"),
)


class Variant(NamedTuple):
    arch: str
    shape: tuple[str, str, int, int]
    rows: int
    option: str
    kernel: str = DECODE

    def __str__(self) -> str:
        dtype, kv_dtype, dim, dim_v = self.shape
        dims = str(dim) if dim == dim_v else f"{dim}/{dim_v}"
        kind = dtype if dtype == kv_dtype else f"{dtype} over {kv_dtype}"
        return f"{self.arch} {self.kernel} {kind} {dims}, {self.rows} rows, {self.option}"


def variants(arch: str) -> list[Variant]:
    """Every option with the usual head dim, a few with the others, each tile of rows; the merge and the split. Of the
    architectures between, which have the instructions of these two, the most demanding."""
    simple = [Variant(arch, shape, rows, option, SIMPLE) for shape, tiles, option in SIMPLE_SHAPES for rows in tiles]
    simple += [Variant(arch, shape, tiles[0], option, SIMPLE_COMBINE) for shape, tiles, option in SIMPLE_SHAPES[:3]]
    if arch not in ("sm_80", "sm_90a"):
        usual = [Variant(arch, SHAPES[0], rows, option) for option in ("paged", "pointers") for rows in (16, 64)]
        others = [Variant(arch, shape, 64, "paged window sinks") for shape in SHAPES]
        more = [Variant(arch, SHAPES[n], 16, "pointers") for n in (7, 6)]
        return [*usual, *others, *more, *simple]
    usual = [Variant(arch, SHAPES[0], rows, option) for option in OPTIONS for rows in (16, 64)]
    usual.append(Variant(arch, SHAPES[0], 32, "paged"))
    others = [Variant(arch, shape, rows, option) for shape in SHAPES[1:] for rows, option in FEW]
    merges = [Variant(arch, shape, 16, option, COMBINE) for shape in SHAPES[:4:3] for _, option in FEW]
    plans = [Variant(arch, SHAPES[0], 16, option, PLAN) for option in ("paged", "paged varlen", "paged window sinks")]
    return [*usual, *others, *merges, *plans, *simple]


# Checked by every test run; the rest is the sweep's.
SAMPLE = {
    "sm_80": ((SHAPES[4], 16, "paged"),),
    "sm_86": ((SHAPES[3], 64, "paged window sinks"),),
    "sm_89": ((SHAPES[7], 16, "pointers"),),
    "sm_90a": ((SHAPES[1], 16, "paged"),),
    "sm_100a": ((SHAPES[6], 16, "pointers"),),
    "sm_120a": ((SHAPES[0], 64, "paged"),),
}


class Finding(NamedTuple):
    """What became of a variant. blocks: that fit on a multiprocessor, and that the tile counts on. wrong: with its
    instructions."""

    code: Code
    shared: int
    threads: int
    blocks: tuple[int, int]
    wrong: list[str]


def key_of(variant: Variant) -> DispatchKey:
    dtype, kv_dtype, dim, dim_v = variant.shape
    fp8, simple = ELEMENTS[kv_dtype].fp8, variant.kernel in (SIMPLE, SIMPLE_COMBINE)
    given = {
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "out_dtype": ELEMENTS[dtype].out,
        "compute": ELEMENTS[dtype].computes[0],
        "head_dim": dim,
        "head_dim_v": dim_v,
        "descales": fp8,
        "heads_q": BASE.heads_kv * variant.rows,
    }
    problem = dataclasses.replace(BASE, **(given | SIMPLE_OPTIONS[variant.option]))  # type: ignore[arg-type]
    key = emulated_decode.key_of(problem, variant.arch, SIMPLE if simple else DECODE)
    assert key.row_tile == variant.rows
    return dataclasses.replace(key, kernel=variant.kernel)


def expected_products(key: DispatchKey) -> set[int]:
    """HMMA of the loop. Of the sum over head_dim two passes are unrolled; an odd one comes on top or in the loop."""
    tile, narrow = decode_tile(key).tile, ELEMENTS[key.kv_dtype].fp8
    keys = tile.block_n // (tile.warps // (tile.block_m // 16))  # of a warp
    steps = 2 if narrow else 1
    passes = -(-key.head_dim // (16 * steps))
    unrolled = {passes} if passes <= 2 else {2, 2 + passes % 2}
    if passes == 5:
        unrolled.add(passes)  # beside an odd one, ptxas may unroll the two turns that are left
    return {keys // 8 * count * steps + keys // 16 * (key.head_dim_v // 8) for count in unrolled}


def exponent_faults(text: str, macros: dict[str, str]) -> list[str]:
    """In the loop, a lane has a quarter of its warp's keys of two rows. The merge has a difference of bases and what
    rounding took off one, too."""
    key_warps = int(macros["WARPS"]) // (int(macros["BLOCK_M"]) // 16)
    return fused_corrections(text, weights=int(macros["BLOCK_N"]) // key_warps // 2 + 1, corrections=2 + 1)


def instruction_faults(key: DispatchKey, code: Code, macros: dict[str, str]) -> list[str]:
    """Of decode_mma's machine code: products, asynchronous copies of 16 bytes and no smaller ones, exponentials."""
    if code.text is None:
        return []
    tensor, expected = code.count(HMMA), expected_products(key)
    copies, narrow = code.count(r"\bLDGSTS\.\S+"), code.count(r"\bLDGSTS\.(?!\S*\.128\b)\S+")
    checks = {
        f"{tensor} HMMA instead of {expected}": tensor not in expected,
        f"{narrow} of {copies} copies below 16 bytes": copies == 0 or narrow != 0,
    }
    return wrong(checks) + exponent_faults(code.text, macros)


@functools.cache
def examine(variant: Variant, mutant: Mutant | None = None) -> Finding:
    """mutant: a bug to seed, whose file is a header."""
    key = key_of(variant)
    source = kernel_source(key)
    if mutant is not None:
        source = with_bug(source, mutant.file, mutant.old, mutant.new)
    code, macros = code_of(source, variant.kernel), dict(source.macros)
    threads, shared = 32 * int(macros["WARPS"]), int(macros["SHARED_BYTES"]) + code.resources.shared_bytes
    decodes = variant.kernel == DECODE
    return Finding(
        code=code,
        shared=shared,
        threads=threads,
        blocks=(
            occupancy(variant.arch, code.resources.registers, shared, threads).blocks,
            decode_tile(key).blocks if decodes else 1,
        ),
        wrong=instruction_faults(key, code, macros) if decodes else [],
    )


def faults(variant: Variant, mutant: Mutant | None = None) -> list[str]:
    """What the gate holds against a variant."""
    found = examine(variant, mutant)
    fit, wanted = found.blocks
    room = shared_a_multiprocessor(variant.arch)
    checks = {
        f"{fit} blocks fit, and {wanted} should": fit < wanted,
        f"{wanted} x {found.shared} bytes of shared memory of {room}": wanted * (found.shared + 1024) > room,
    }
    return code_faults(found.code, register_limit(found.threads, wanted)) + wrong(checks) + found.wrong


@pytest.mark.parametrize("arch", ARCHS)
def test_a_sample_of_the_variants_passes_the_gate(arch):
    sample = [v for v in variants(arch) if (v.shape, v.rows, v.option) in SAMPLE[arch] and v.kernel == DECODE]
    assert len(sample) == len(SAMPLE[arch])
    assert {str(variant): faults(variant) for variant in sample if faults(variant)} == {}


def test_decode_simple_and_its_merge_pass_the_gate():
    for kernel, shape in ((SIMPLE, SIMPLE_SHAPES[4][0]), (SIMPLE_COMBINE, SIMPLE_SHAPES[2][0])):
        variant = next(v for v in variants("sm_86") if (v.kernel, v.shape) == (kernel, shape))
        assert faults(variant) == []


def test_plan_and_merge_pass_the_gate():
    for kernel in (PLAN, COMBINE):
        variant = next(v for v in variants("sm_80") if v.kernel == kernel)
        assert faults(variant) == []


@pytest.mark.sweep
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_variant_passes_the_gate(arch):
    assert {str(variant): faults(variant) for variant in variants(arch) if faults(variant)} == {}


def test_the_gate_counts_what_it_says():
    """Scores of 512 keys are more than a warp has registers for: the compiler spills, and says so."""
    source = kernel_source(key_of(Variant("sm_80", SHAPES[9], 64, "paged")))
    ring = 2 * 512 * 2 * 96  # stages, keys, K and V, bytes of a row of 40
    macros = {**source.macros, "BLOCK_N": "512", "STAGES": "2", "SHARED_BYTES": str(64 * 96 + ring)}
    resources = Compiler().compile(dataclasses.replace(source, macros=macros)).resources[DECODE]
    assert resources.spill_bytes > 0
    assert resources.stack_bytes > 0


def test_the_gate_sees_a_correction_of_a_fused_product():
    variant = next(v for v in variants("sm_80") if (v.shape, v.rows, v.option) == (SHAPES[4], 16, "paged"))
    mutant = next(mutant for mutant in DECODE_DEFECTS if (mutant.old, mutant.new) == FUSED_CORRECTION)
    assert faults(variant) == []
    assert [fault.split(" ")[0] for fault in faults(variant, mutant)] == ["exponentials"]


def judge(variant: Variant) -> tuple[str, list[str]]:
    found = examine(variant)
    tensor = found.code.count(HMMA) if variant.kernel == DECODE else ""
    blocks = f"{found.blocks[1]} x {found.threads}"
    return f"{found.code.resources.registers} | {found.shared} | {blocks} | {tensor}", faults(variant)


def main() -> int:
    return write_page(
        [variant for arch in ARCHS for variant in variants(arch)],
        judge,
        "decode",
        ("registers", "shared memory, bytes", "blocks x threads", "HMMA"),
    )


if __name__ == "__main__":
    sys.exit(main())
