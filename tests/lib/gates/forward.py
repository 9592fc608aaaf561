"""The rows of forward_mma and forward_wide, which multiply with mma.sync.

Besides the limits of every row: the products of the tile, shared memory for as many blocks as the tile needs, and
softmax corrections computed from differences (FADD), never from fused products (FFMA), so that they are 1 if a maximum
stays.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from emulated.forward import key_of, ml_dtype, problem_of
from gates.exponents import exponential_limits, exponentials
from gates.rows import SHARED, Family, Plan, at_most, dims_of, exactly, numbers_of, rows_of
from inside.kernels import TILES, capability, dispatch_key, example_problem, shared_mem_limit
from support.gate import ARCHS, Code, kernel_source, register_limit

from gpu_actors import KernelSource

__all__ = ["FORWARD", "FORWARD_WIDE", "MMA_SHAPES", "MmaVariant", "Shape"]

Shape = tuple[str, str | None, int, int]  # dtype, compute, head_dim, head_dim_v


class MmaVariant(NamedTuple):
    """A variant of the kernels that multiply with mma.sync."""

    arch: str
    shape: Shape
    option: str

    def __str__(self) -> str:
        dtype, compute, *dims = self.shape
        return f"{self.arch} {compute or dtype} {dims_of(*dims)} {self.option}"


# Every row of the tile table, padded rows, unequal dims.
MMA_SHAPES: tuple[Shape, ...] = (
    ("float16", None, 64, 64),
    ("bfloat16", None, 128, 128),
    ("float16", None, 256, 256),
    ("bfloat16", None, 192, 128),
    ("bfloat16", None, 40, 40),
    ("float16", None, 96, 96),
    ("float32", "tf32", 64, 64),
    ("float32", "bf16", 128, 128),
    ("float32", "tf32", 256, 256),
)
# Every row of the tile table, unequal dims, unequal halves.
WIDE_SHAPES: tuple[Shape, ...] = (
    ("bfloat16", None, 512, 512),
    ("float16", None, 512, 256),
    ("float16", None, 264, 512),
    ("bfloat16", None, 320, 320),
    ("bfloat16", None, 448, 448),
)
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


def variants(shapes: tuple[Shape, ...], whole: int) -> list[MmaVariant]:
    """Every option with the first shapes, a few with the others."""
    return [
        MmaVariant(arch, shape, option)
        for arch in ARCHS
        for n, shape in enumerate(shapes)
        for option in (OPTIONS if n < whole else FEW)
    ]


def read(code: Code) -> dict[str, float]:
    assert code.text is not None
    return {"HMMA": code.count(r"\bHMMA\."), **exponentials(code.text)}


# forward_mma


def mma_products(source: KernelSource) -> int:
    """HMMA of both loops. The sum over head_dim is unrolled by two steps and keeps a remainder."""
    number, itemsize = numbers_of(source), 4 if source.macros["ELEMENT"] == "float" else 2
    row_blocks = number["BLOCK_M"] // (16 * number["WARPS"])
    steps = -(-number["HEAD_DIM"] * itemsize // 32)
    unrolled = steps if steps <= 2 else 2 + steps % 2
    keys = number["BLOCK_N"] // 8 * unrolled
    values = number["HEAD_DIM_V"] // 8 * number["BLOCK_N"] // (32 // itemsize)
    return 2 * row_blocks * (keys + values)


def mma_plan(variant: MmaVariant) -> Plan:
    dtype, compute, dim, dim_v = variant.shape
    q, v = (np.zeros((1, 64, 2, width), ml_dtype(dtype)) for width in (dim, dim_v))
    problem = dataclasses.replace(problem_of(q, q, v, compute=compute), **OPTIONS[variant.option])
    source = kernel_source(key_of(problem, variant.arch, "forward_mma"))
    number = numbers_of(source)
    tile = (number["BLOCK_M"], number["BLOCK_N"], number["STAGES"], number["WARPS"])
    blocks = max(row.blocks for row in TILES if row.kernel == "forward_mma" and row.tile == tile)
    row_blocks = number["BLOCK_M"] // (16 * number["WARPS"])
    return Plan(
        source,
        "forward_mma",
        register_limit(32 * number["WARPS"], blocks),
        {
            SHARED: at_most(shared_mem_limit(capability(variant.arch))),
            "HMMA": exactly(mma_products(source)),
            # In each of two loops, a lane has a quarter of the keys for two of 16 rows. The rounding errors of bases
            # add a fused product a row.
            **exponential_limits(weights=row_blocks * (number["BLOCK_N"] + 2), corrections=4 * row_blocks),
        },
        {"blocks": blocks, SHARED: blocks * number["SHARED_BYTES"]},
        read,
    )


F16, BF16 = MMA_SHAPES[:2]
FORWARD = Family(
    "forward",
    rows_of(
        "forward",
        variants(MMA_SHAPES, 3),
        mma_plan,
        [
            MmaVariant("sm_80", F16, "causal"),
            MmaVariant("sm_80", BF16, "causal varlen"),
            MmaVariant("sm_86", MMA_SHAPES[2], "window sinks"),
            MmaVariant("sm_89", BF16, "causal varlen"),
            MmaVariant("sm_90a", BF16, "window sinks"),
            MmaVariant("sm_100a", BF16, "causal"),
            MmaVariant("sm_103a", MMA_SHAPES[4], "dropout"),
            MmaVariant("sm_120a", F16, "bias"),
        ],
    ),
    tiles="forward_mma",
)


# forward_wide


def wide_products(source: KernelSource, arch: str) -> int:
    """HMMA of a warp: the sum over its half of head_dim is unrolled by two pairs of chunks.

    If the number of pairs is odd, code for sm_100 and later has the first pair in front of the loop too, and other code
    leaves the loop in its middle. Both run the same number of products.
    """
    number = numbers_of(source)
    half_v = -(-number["HEAD_DIM_V"] // 64) * 4  # blocks of 8 columns
    if number["HEAD_DIM_V"] % 64:
        half_v -= max(0, 4 - number["HEAD_DIM_V"] % 64 // 8)  # blocks that neither warp has
    groups, rest = divmod(number["HEAD_DIM"], 64)
    pairs = 2 * groups + min(2, -(-rest // 16))  # of chunks, in the first warp's half
    unrolled = 2 + (pairs % 2 if capability(arch) >= 100 else 0)
    return number["BLOCK_N"] // 8 * unrolled + number["BLOCK_N"] // 16 * half_v


def wide_plan(variant: MmaVariant) -> Plan:
    dtype, _, dim, dim_v = variant.shape
    options: dict[str, Any] = {"head_dim_v": dim_v, "return_lse": True, **OPTIONS[variant.option]}
    key = dispatch_key(example_problem(dtype, dim, **options), variant.arch)
    assert key.kernel == "forward_wide"
    source = kernel_source(key)
    number = numbers_of(source)
    return Plan(
        source,
        "forward_wide",
        register_limit(32 * number["WARPS"]),
        {
            SHARED: at_most(shared_mem_limit(capability(variant.arch))),
            "HMMA": exactly(wide_products(source, variant.arch)),
            **exponential_limits(weights=number["BLOCK_N"] + 2, corrections=4),
        },
        {SHARED: number["SHARED_BYTES"]},
        read,
    )


FORWARD_WIDE = Family(
    "forward_wide",
    rows_of(
        "forward_wide",
        variants(WIDE_SHAPES, 1),
        wide_plan,
        [MmaVariant("sm_90a", WIDE_SHAPES[0], "window sinks")],
    ),
    tiles="forward_wide",
)
