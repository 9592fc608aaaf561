"""The rows of backward_mma and of the kernels before and after it.

Besides the limits of every row: the products of the tile, shared memory, and at head dim 128 a step of about as many
instructions as FlashAttention-2's and no more loads of operands.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from emulated.backward import KERNEL, backward_problem_of
from emulated.forward import key_of, ml_dtype
from gates.forward import MMA_SHAPES, MmaVariant, Shape
from gates.rows import SHARED, Family, Plan, Row, at_most, between, numbers_of, plain_plan, rows_of
from inside.kernels import BACKWARD_MMA, capability, shared_mem_limit, tile_of
from support.gate import ARCHS, Code, kernel_source, register_limit

from benchmarks.sass import main_step
from gpu_actors import DispatchKey, KernelSource

__all__ = ["BACKWARD"]

# FlashAttention-2's kernel for sm_80 in torch 2.14's wheel has 1,003 and 144 at head dim 128.
STEP_LIMITS = {"instructions a step": at_most(1010), "loads of operands a step": at_most(144)}

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window sinks": {"causal": True, "window_size": (9, 0), "sink_tokens": 4, "sinks": True, "layout": "varlen"},
    "dropout": {"causal": True, "dropout_p": 0.1, "layout": "varlen"},
    "bias": {"bias": ("float32", True, True), "softcap": 20.0, "deterministic": True},
    "alibi": {"causal": True, "alibi": "heads", "deterministic": True},
}
FEW = ("dropout", "bias")
# Architectures that differ in shared memory and reductions; the others' code is nearly the same.
MAIN_ARCHS = ("sm_80", "sm_86", "sm_90a")


def options_of(arch: str, shape: Shape) -> tuple[str, ...]:
    """Every option with the usual head dims, a few with the others, one on the other architectures."""
    usual = shape in MMA_SHAPES[:2]
    if arch not in MAIN_ARCHS:
        return ("causal",) if usual else ()
    return tuple(OPTIONS) if usual else FEW


def key_of_variant(variant: MmaVariant) -> DispatchKey:
    dtype, compute, dim, dim_v = variant.shape
    q, v = (np.zeros((1, 64, 2, width), ml_dtype(dtype)) for width in (dim, dim_v))
    problem = dataclasses.replace(backward_problem_of(q, q, v, compute=compute), **OPTIONS[variant.option])
    return key_of(problem, variant.arch, KERNEL)


def unrolled(steps: int, by: int) -> int:
    """How many bodies a loop of so many steps has: the unrolled ones and a remainder."""
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


def products(source: KernelSource) -> tuple[int, int]:
    """(fewest, most) HMMA of the code. One loop serves tiles with a mask and without."""
    macros, number = source.macros, numbers_of(source)
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
    # A product over columns is unrolled by 4 steps if registers allow, over queries by all, over keys by 2 or 4.
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


def plan(variant: MmaVariant) -> Plan:
    key = key_of_variant(variant)
    source, tile = kernel_source(key), tile_of(key)
    # Limits of a step and warp without a mask, with the scale alone between product and weight.
    limited = key.head_dim == key.head_dim_v == 128 and tile.block_m == 64 and key.mask == "full" and key.scale_only

    def read(code: Code) -> dict[str, float]:
        assert code.text is not None
        figures: dict[str, float] = {"HMMA": code.count(r"\bHMMA\.")}
        if limited:
            step = main_step(code.text, tile.block_m * tile.block_n * 5 * 128 / tile.warps)
            assert step is not None
            figures |= dict(zip(STEP_LIMITS, (step.instructions, step.opcodes["LDSM"]), strict=True))
        return figures

    return Plan(
        source,
        KERNEL,
        register_limit(32 * numbers_of(source)["WARPS"]),
        {
            SHARED: at_most(shared_mem_limit(capability(variant.arch))),
            "HMMA": between(*products(source)),
            **(STEP_LIMITS if limited else {}),
        },
        {SHARED: numbers_of(source)["SHARED_BYTES"]},
        read,
    )


def companion_rows(name: str) -> tuple[Row, ...]:
    """The rows of a kernel that runs before or after backward_mma."""

    def own_plan(variant: MmaVariant) -> Plan:
        return plain_plan(dataclasses.replace(key_of_variant(variant), kernel=name), name)

    variants = [MmaVariant("sm_80", BF16, option) for option in ("full", "bias")]
    return rows_of(name, variants, own_plan, variants)


BF16 = MMA_SHAPES[1]
BACKWARD = Family(
    "backward",
    (
        *rows_of(
            "backward",
            [
                MmaVariant(arch, shape, option)
                for arch in ARCHS
                for shape in MMA_SHAPES
                for option in options_of(arch, shape)
            ],
            plan,
            [
                MmaVariant("sm_80", BF16, "causal"),
                MmaVariant("sm_80", MMA_SHAPES[8], "dropout"),
                MmaVariant("sm_86", MMA_SHAPES[2], "bias"),
                MmaVariant("sm_90a", BF16, "window sinks"),
            ],
        ),
        *(row for name in BACKWARD_MMA.companions for row in companion_rows(name)),
    ),
    tiles=KERNEL,
)
