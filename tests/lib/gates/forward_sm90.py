"""The rows of forward_sm90, by NVRTC and by nvcc.

Besides the limits of every row:

- as many products (HGMMA, for 8 bits QGMMA) as the tile has, once in the loop and once outside it;
- every special function of a loop between the waits for S and for O, while the tensor cores still multiply; a score
  modification may compute what depends on rows and keys alone before these waits. With 8 bits and three consumers (head
  dim 64), 256 keys a tile or a head dim above 128, registers hold a tile's scores or its sums, not both. There special
  functions may be after all waits, beside other consumers' products only; with only the scale between product and
  score, the instructions of an iteration are then at most the clocks of those products;
- at most four moves from vector to uniform registers in a loop by NVRTC, sixteen by nvcc; four more with a score
  modification, whose divisions by numbers move their reciprocals, and eight more with dropout, because Philox
  multiplies by constants in uniform registers;
- if some tiles need a mask, a branch that skips it in the others;
- softmax corrections computed from differences (FADD), never from fused products (FFMA), so that they are 1 if a
  maximum stays;
- with only the scale between product and score, an iteration without a mask that takes at most 60% of the issue slots
  while the tensor cores are busy: instructions times two over the products' clocks. With three consumers (head dim 64),
  three warps share a scheduler, so the true share is 1.5 times as large. 8-bit products take half the clocks, but
  their softmax takes as many instructions: there the limit is 110%, and products wait for the softmax.

Registers are those at launch; setmaxnreg then gives the producer 24 and consumers 240 of them, or 32 and 160 with three
consumers. Instructions are those of an iteration without a mask.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from cases.score_mods import case_of, forward_graph
from emulated.forward import key_of, ml_dtype, problem_of
from gates.exponents import exponential_limits, exponentials
from gates.hopper import ARCH, REGISTERS, SHARED_LIMIT, WgmmaVariant
from gates.rows import COMPILERS, SHARED, Family, Plan, at_least, at_most, exactly, numbers_of, rows_of
from inside.attention import ScoreMod
from inside.graph import match_attention
from inside.kernels import ELEMENTS, padded_head_dim
from support.gate import Code, kernel_source
from support.hopper_sass import instructions_of, main_loops, opcodes

from gpu_actors import KernelSource

__all__ = ["FORWARD_SM90"]

KERNEL = "forward_sm90"

FLOPS_A_CLOCK = 4096  # of a multiprocessor: 512 dense 16-bit multiply-adds on each of four tensor cores
# The share of issue slots that an iteration without a mask may take while the tensor cores multiply: twice its
# instructions (two warps share a scheduler) over the products' clocks.
BUDGET = 0.60
# 8-bit products take half the clocks, but the softmax as many instructions, so that products wait for it.
BUDGET_FP8 = 1.10
# From vector to uniform registers, in any loop. If uniform registers run out, ptxas keeps a few descriptors in vector
# registers: none in most loops with NVRTC, whose cubins run, more with the older ptxas of nvcc 13.0.
MOVES = {"NVRTC": 4, "nvcc": 16}
SECONDS = 1.0  # that a cold compile may take

LATE, UNIFORM = "special functions outside the overlap", "moves to uniform registers"
SLOTS, MASK, ALONE = "issue slots", "instructions of the mask", "instructions beside others' products only"

EVERYTHING: dict[str, Any] = {
    "causal": True,
    "window_size": (9, 0),
    "sink_tokens": 4,
    "sinks": True,
    "alibi": "heads",
    "softcap": 20.0,
}
BIASED: dict[str, Any] = {**EVERYTHING, "bias": ("float32", False, False)}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "causal varlen": {"causal": True, "layout": "varlen"},
    "pages": {"causal": True, "layout": "paged", "page_size": 64, "varlen_q": True, "seqlen_q": 64},
    "window": {"window_size": (9, 9)},
    "window sinks": {"causal": True, "window_size": (9, 0), "sink_tokens": 4, "sinks": True, "layout": "varlen"},
    "alibi": {"causal": True, "alibi": "heads"},
    "softcap": {"causal": True, "softcap": 20.0},
    "everything": {**EVERYTHING, "layout": "varlen"},
    "bias": {"bias": ("bfloat16", False, False)},
    "wide bias": {"causal": True, "bias": ("float32", True, False)},
    "bool bias": {"bias": ("bool", False, True)},
    "dropout": {"causal": True, "dropout_p": 0.1, "layout": "varlen"},
    "dropout, places": {"dropout_p": 0.1, "q_positions": 2, "k_positions": 2},
    "everything dense": {**BIASED, "dropout_p": 0.1},
    "everything biased": {**BIASED, "dropout_p": 0.0},
    "everything dropped": {**EVERYTHING, "layout": "varlen", "dropout_p": 0.1},
}
DRAWS = ("dropout", "dropout, places", "everything dense", "everything dropped")
LOADS = ("bias", "wide bias", "bool bias", "everything biased")
# Score modifications of cases.score_mods: one that reads memory, one that divides integers, one with special functions.
MODIFIED = ("document mask", "natten 2d", "tanh gating")
SHAPES = (
    ("bfloat16", 64, 64),
    ("bfloat16", 96, 96),
    ("bfloat16", 128, 128),
    ("bfloat16", 192, 192),
    ("bfloat16", 192, 128),
    ("bfloat16", 256, 256),
    ("float16", 64, 64),
    ("float16", 128, 128),
    ("float16", 256, 256),
    ("float16", 40, 40),
    ("bfloat16", 80, 72),
    ("float8_e4m3fn", 64, 64),
    ("float8_e4m3fn", 128, 128),
    ("float8_e4m3fn", 256, 256),
    ("float8_e4m3fn", 192, 96),
    ("float8_e4m3fn", 192, 192),
    ("float8_e5m2", 64, 64),
    ("float8_e5m2", 128, 128),
    ("float8_e5m2", 256, 256),
)
FEW = ("causal", "everything")
FEW_FP8 = ("full", "causal", "window sinks", "everything", "wide bias", "bool bias")
# Every option with every padded head dim in bf16, a few with the rest. Above head dim 192 none has a bias and dropout.
TWO = ("everything biased", "everything dropped")
VARIANTS = tuple(
    WgmmaVariant(*shape, option)
    for n, shape in enumerate(SHAPES)
    for option in ((*OPTIONS, *MODIFIED) if n < 6 else FEW_FP8 if ELEMENTS[shape[0]].fp8 else FEW)
    if option not in (("everything dense", "dropout, places") if shape[1] > 192 else TWO)
)


def score_mod(variant: WgmmaVariant) -> ScoreMod | None:
    if variant.option not in MODIFIED:
        return None
    return match_attention(forward_graph(case_of(variant.option, "float16"))).problem.score_mod


@functools.cache
def source_of(variant: WgmmaVariant) -> KernelSource:
    q, v = (np.zeros((1, 64, 2, width), ml_dtype(variant.dtype)) for width in (variant.dim, variant.dim_v))
    options = OPTIONS.get(variant.option) or {"score_mod": score_mod(variant)}
    problem = dataclasses.replace(problem_of(q, q, v), **options, descales=ELEMENTS[variant.dtype].fp8)
    return kernel_source(key_of(problem, ARCH, KERNEL))


def may_be_alone(variant: WgmmaVariant, number: dict[str, int]) -> bool:
    """Whether registers hold a tile's scores or its sums of 8-bit products, not both."""
    widest = max(padded_head_dim(dim, variant.dtype) for dim in (variant.dim, variant.dim_v))
    return ELEMENTS[variant.dtype].fp8 and (widest > 128 or number["WARPS"] == 16 or number["BLOCK_N"] > 128)


def plan(compiler: str, variant: WgmmaVariant) -> Plan:
    source = source_of(variant)
    number, fp8 = numbers_of(source), ELEMENTS[variant.dtype].fp8
    keys, consumers = number["BLOCK_N"], number["WARPS"] // 4 - 1
    dim, dim_v = (padded_head_dim(dim, variant.dtype) for dim in (variant.dim, variant.dim_v))
    step, opcode = (32, "QGMMA") if fp8 else (16, "HGMMA")
    products = dim // step + number.get("PIECES", 1) * keys // step
    clocks = 2 * 2 * number["BLOCK_M"] * keys * (dim + dim_v) / 2 / FLOPS_A_CLOCK * 16 / step
    modified, masked = variant.option in MODIFIED, "WINDOW" in number or "CAUSAL" in number
    moves = MOVES[compiler] + (4 if modified else 8 if variant.option in DRAWS else 0)
    limits = {
        SHARED: at_most(SHARED_LIMIT),
        opcode: exactly(2 * products),
        "loops": exactly(1),
        MASK: at_least(keys // 2 + 1) if masked else at_most(keys // 2),
        LATE: exactly(0),
        UNIFORM: at_most(moves),
        # A thread has half of a tile's keys, in the loop and before it. The rounding errors of two bases come last.
        **exponential_limits(weights=keys + 2, corrections=2),
    }
    if variant.option not in ("alibi", "softcap", "everything", *DRAWS, *LOADS, *MODIFIED):
        limits[SLOTS] = at_most(BUDGET_FP8 if fp8 else BUDGET)
        limits[ALONE] = at_most(clocks * (consumers - 1) / consumers)  # of the products of the other consumers
    if not may_be_alone(variant, number):
        limits[ALONE] = exactly(0)

    def read(code: Code) -> dict[str, float]:
        assert code.text is not None
        lines = instructions_of(code.text)
        loops = main_loops(lines, products)
        figures: dict[str, float] = {opcode: opcodes([text for _, text in lines])[opcode], "loops": len(loops)}
        figures |= exponentials(code.text)
        if loops:
            loop = loops[0]  # if there are more, "loops" is a fault
            figures |= {
                "instructions": loop.instructions,
                MASK: loop.masking,
                SLOTS: 2 * loop.instructions / clocks,
                "special functions": loop.count("MUFU"),
                # A modification may compute what depends on rows and keys alone before S is there.
                LATE: loop.after["MUFU"] + (0 if modified else loop.before["MUFU"]),
                UNIFORM: loop.count("R2UR"),
                ALONE: loop.instructions if loop.alone else 0,
            }
        return figures

    return Plan(source, KERNEL, REGISTERS[number["WARPS"]], limits, {SHARED: number["SHARED_BYTES"]}, read)


SAMPLE = (
    WgmmaVariant("bfloat16", 128, 128, "causal"),
    WgmmaVariant("bfloat16", 64, 64, "full"),
    WgmmaVariant("float8_e4m3fn", 128, 128, "full"),
)
FORWARD_SM90 = Family(
    "forward_sm90",
    tuple(
        row
        for compiler in COMPILERS
        for row in rows_of("forward_sm90", VARIANTS, functools.partial(plan, compiler), SAMPLE, compiler)
    ),
    tiles=KERNEL,
    seconds=SECONDS,
)
