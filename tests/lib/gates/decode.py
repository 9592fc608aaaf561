"""The rows of decode_mma, its plan and its merge, of decode_simple and its merge, and of the kernels of a cascade.

Besides the limits of every row: as many blocks on a multiprocessor as the tile needs, and for decode_mma the products
of the tile, asynchronous copies of 16 bytes and no smaller ones, and softmax corrections computed from differences.
Rows of a cascade have no further limits.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from emulated import decode as emulated_decode
from gates.exponents import exponential_limits, exponentials
from gates.rows import (
    SHARED,
    Family,
    Limit,
    Plan,
    at_least,
    at_most,
    dims_of,
    exactly,
    numbers_of,
    plain_plan,
    rows_of,
)
from inside.bench import problem_of
from inside.kernels import (
    COMBINE,
    DECODE,
    ELEMENTS,
    PLAN,
    SIMPLE,
    SIMPLE_COMBINE,
    decode_tile,
    dispatch_key,
    occupancy,
    program_of,
    shared_a_multiprocessor,
)
from inside.planning import prefix_problem, tail_problem
from support.gate import ARCHS, Code, kernel_source, register_limit

from gpu_actors import DispatchKey, KernelSource

__all__ = ["BASE", "CASCADE", "DECODE_ROWS", "SHAPES", "Variant"]

BASE = dataclasses.replace(problem_of(np.full(4, 100, np.int32)), return_lse=True)
FP8 = "float8_e4m3fn"
BLOCKS = "blocks that fit"

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
ALL_SCORES: dict[str, Any] = {"causal": True, "softcap": 20.0, "alibi": "batch", "bias": ("float32", False, False)}
ALL_SCORES |= {"window_size": (9, -1), "sink_tokens": 4, "sinks": True}
SIMPLE_OPTIONS: dict[str, dict[str, Any]] = {
    **OPTIONS,
    "paged scores": ALL_SCORES,
    "float64 scores": {**ALL_SCORES, "bias": ("float64", False, False)},
    "latent": {"latent": True, "layout": "cache", "page_size": 0},
}
# Of decode_simple, with the rows of its tiles: q of 16 to 64 bits, the widest heads, and head dims not in whole chunks.
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
        dtype, kv_dtype, *dims = self.shape
        kind = dtype if dtype == kv_dtype else f"{dtype} over {kv_dtype}"
        return f"{self.arch} {self.kernel} {kind} {dims_of(*dims)}, {self.rows} rows, {self.option}"


def variants(arch: str) -> list[Variant]:
    """Every option with the usual head dim, a few with the others, each tile of rows; the merge and the split. The most
    demanding of these on other architectures, which have the instructions of sm_80 or sm_90a."""
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


def key_of(variant: Variant) -> DispatchKey:
    dtype, kv_dtype, dim, dim_v = variant.shape
    given = {
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "out_dtype": ELEMENTS[dtype].out,
        "compute": ELEMENTS[dtype].computes[0],
        "head_dim": dim,
        "head_dim_v": dim_v,
        "descales": ELEMENTS[kv_dtype].fp8,
        "heads_q": BASE.heads_kv * variant.rows,
    }
    problem = dataclasses.replace(BASE, **(given | SIMPLE_OPTIONS[variant.option]))  # type: ignore[arg-type]
    simple = variant.kernel in (SIMPLE, SIMPLE_COMBINE)
    key = emulated_decode.key_of(problem, variant.arch, SIMPLE if simple else DECODE)
    assert key.row_tile == variant.rows
    return dataclasses.replace(key, kernel=variant.kernel)


def products(key: DispatchKey) -> set[int]:
    """HMMA of the loop. Two passes of the sum over head_dim are unrolled; an odd pass is added or is in the loop."""
    tile, narrow = decode_tile(key).tile, ELEMENTS[key.kv_dtype].fp8
    keys = tile.block_n // (tile.warps // (tile.block_m // 16))  # of a warp
    steps = 2 if narrow else 1
    passes = -(-key.head_dim // (16 * steps))
    unrolled = {passes} if passes <= 2 else {2, 2 + passes % 2}
    if passes == 5:
        unrolled.add(passes)  # besides the odd pass, ptxas may unroll the two turns that are left
    return {keys // 8 * count * steps + keys // 16 * (key.head_dim_v // 8) for count in unrolled}


def mma_limits(key: DispatchKey, source: KernelSource) -> dict[str, Limit]:
    number = numbers_of(source)
    key_warps = number["WARPS"] // (number["BLOCK_M"] // 16)
    return {
        "HMMA": exactly(*products(key)),
        "copies": at_least(1),
        "copies below 16 bytes": exactly(0),
        # In the loop, a lane has a quarter of its warp's keys for two rows. The merge adds a difference of bases, and a
        # fused product for the rounding error of one.
        **exponential_limits(weights=number["BLOCK_N"] // key_warps // 2 + 1, corrections=2 + 1),
    }


def read_mma(code: Code) -> dict[str, float]:
    assert code.text is not None
    return {
        "HMMA": code.count(r"\bHMMA\."),
        "copies": code.count(r"\bLDGSTS\.\S+"),
        "copies below 16 bytes": code.count(r"\bLDGSTS\.(?!\S*\.128\b)\S+"),
        **exponentials(code.text),
    }


def plan(variant: Variant) -> Plan:
    key = key_of(variant)
    source, decodes = kernel_source(key), variant.kernel == DECODE
    number = numbers_of(source)
    threads, blocks = 32 * number["WARPS"], decode_tile(key).blocks if decodes else 1

    def read(code: Code) -> dict[str, float]:
        shared = number["SHARED_BYTES"] + code.resources.shared_bytes
        fit = occupancy(variant.arch, code.resources.registers, shared, threads).blocks
        room = {BLOCKS: fit, SHARED: blocks * (shared + 1024)}
        return room | (read_mma(code) if decodes else {})

    return Plan(
        source,
        variant.kernel,
        register_limit(threads, blocks),
        {
            BLOCKS: at_least(blocks),
            SHARED: at_most(shared_a_multiprocessor(variant.arch)),
            **(mma_limits(key, source) if decodes else {}),
        },
        {},
        read,
    )


DECODE_ROWS = Family(
    "decode",
    rows_of(
        "decode",
        [variant for arch in ARCHS for variant in variants(arch)],
        plan,
        [
            Variant("sm_80", SHAPES[4], 16, "paged"),
            Variant("sm_86", SHAPES[3], 64, "paged window sinks"),
            Variant("sm_90a", SHAPES[1], 16, "paged"),
            Variant("sm_103a", SHAPES[6], 16, "pointers"),
            Variant("sm_120a", SHAPES[0], 64, "paged"),
            Variant("sm_80", SHAPES[0], 16, "paged", PLAN),
            Variant("sm_80", SHAPES[0], 16, "paged", COMBINE),
            Variant("sm_86", SIMPLE_SHAPES[4][0], 8, "float64 scores", SIMPLE),
            Variant("sm_86", SIMPLE_SHAPES[2][0], 8, "float64 scores", SIMPLE_COMBINE),
        ],
    ),
)


# The kernels of a cascade


class Part(NamedTuple):
    """A kernel of a cascade. part: what it attends to, "prefix" or "tails"."""

    arch: str
    kv_dtype: str
    dim: int
    softcap: float
    part: str
    kernel: str

    def __str__(self) -> str:
        return " ".join(map(str, self))


def cascade_kernels(arch: str, dim: int, part: str) -> tuple[str, str]:
    whole = arch == "sm_90a" and dim <= 128 and part == "prefix"  # enough rows, and a head dim, for wgmma
    return ("decode_sm90" if whole else DECODE), COMBINE


def cascade_plan(variant: Part) -> Plan:
    sizes = {"head_dim": variant.dim, "head_dim_v": variant.dim}
    sizes |= {"kv_dtype": variant.kv_dtype, "descales": variant.kv_dtype == FP8}
    base = problem_of(np.full(4, 100, np.int32))
    problem = dataclasses.replace(base, causal=True, softcap=variant.softcap, **sizes)
    if variant.part == "prefix":
        problem = prefix_problem(problem, 1, 128, 128, problem.seqlen_k)
    else:
        problem = tail_problem(problem, problem.seqlen_k)
    keys = {key.kernel: key for key in program_of(problem, dispatch_key(problem, variant.arch)).keys}
    assert tuple(keys) == cascade_kernels(variant.arch, variant.dim, variant.part)
    return plain_plan(keys[variant.kernel], variant.kernel)


CASCADE = Family(
    "cascade",
    rows_of(
        "cascade",
        [
            Part(arch, kv_dtype, dim, softcap, part, kernel)
            for arch in ("sm_80", "sm_90a")
            for kv_dtype, dim in (("bfloat16", 128), (FP8, 128), ("bfloat16", 256), ("bfloat16", 64))
            for softcap in (0.0, 20.0)
            for part in ("prefix", "tails")
            for kernel in cascade_kernels(arch, dim, part)
        ],
        cascade_plan,
        [],
    ),
)
