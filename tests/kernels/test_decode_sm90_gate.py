"""What ptxas makes of decode_sm90, which needs no GPU: spills, notes, and what a step of its main loop takes.

scripts/gate decode_sm90         every variant below; writes build/reports/gate_decode_sm90.md

A variant passes with

- nothing spilled, no stack, no access to local memory, no C75xx note (wgmma serialised);
- as many products (HGMMA) in a step of the main loop as the tile has, and no load beside them;
- at least 128 KiB on their way to a multiprocessor while a stage is multiplied;
- over 16-bit caches, with the scale alone between product and score, at most 250 instructions a step and warp;
- at head dims that fill their boxes, at most 50% of memory's time in shared memory, or 125% over 8-bit caches, which
  are widened there.

Instructions are of a step without a mask, and what masks add. Shared memory is a count: the bytes that arrive by TMA,
that are widened, and that each warpgroup's products read, at 128 bytes a clock, over the time in which an H200's memory
brings the same keys (4.8 TB/s). Seconds are of processor time for a cold compile.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
from emulated import decode as emulated_decode
from support.gate import Code, code_faults, failing, with_bug, write_page, wrong
from support.hopper_sass import instructions_of, opcodes, step_of

from benchmarks.model import MACHINES
from gpu_actors import KernelSource
from gpu_actors.bench.plan import problem_of
from gpu_actors.compiling.compiler import Compiler
from gpu_actors.kernels.hopper_decode.variant import NAME
from gpu_actors.kernels.support import ELEMENTS
from gpu_actors.kernels.tiles import padded_head_dim
from gpu_actors.kernels.variants import kernel_source

H200 = MACHINES["sm_90a"]
SHARED_LIMIT = 232_448
SHARED_BYTES_A_CLOCK = 128
INSTRUCTIONS = 250  # of a step without a mask, where only the scale stands between product and score
SHARED, SHARED_WIDENED = 0.5, 1.25  # of the time that memory takes: 16-bit caches, and 8-bit ones
IN_FLIGHT = 128 << 10  # bytes that are on their way while a stage is multiplied
LAUNCH_REGISTERS = {8: 255, 12: 168, 16: 128}  # by warps: what 65,536 leave for each thread, in steps of 8

BASE = dataclasses.replace(problem_of(np.full(4, 100, np.int32)), return_lse=True)
OPTIONS: dict[str, dict[str, Any]] = {
    "paged": {},
    "paged full": {"causal": False},
    "paged varlen": {"varlen_q": True},
    "paged tree": {"causal": False, "tree_mask": True},
    "paged window sinks": {"window_size": (9, -1), "sink_tokens": 4, "sinks": True},
    "paged chunk": {"attention_chunk": 64},
    "paged softcap": {"softcap": 20.0},
    "paged alibi": {"alibi": "batch"},
    "cache": {"layout": "cache", "page_size": 0},
}
PLAIN = ("paged", "paged full", "paged varlen", "cache")
# (dtype, the cache's, head_dim, head_dim_v)
SHAPES = (
    ("bfloat16", "bfloat16", 128, 128),
    ("float16", "float16", 128, 128),
    ("bfloat16", "bfloat16", 64, 64),
    ("float16", "float16", 96, 96),
    ("bfloat16", "bfloat16", 40, 72),
    ("float16", "float16", 64, 128),
    ("bfloat16", "float8_e4m3fn", 128, 128),
    ("float16", "float8_e4m3fn", 64, 64),
    ("bfloat16", "float8_e5m2", 128, 64),
    ("float8_e4m3fn", "float8_e4m3fn", 128, 128),
    ("float8_e5m2", "float8_e5m2", 64, 64),
)
FEW = ("paged", "paged window sinks")


class Variant(NamedTuple):
    dtype: str
    kv_dtype: str
    dim: int
    dim_v: int
    rows: int
    option: str

    def __str__(self) -> str:
        dims = str(self.dim) if self.dim == self.dim_v else f"{self.dim}/{self.dim_v}"
        over = "" if self.kv_dtype == self.dtype else f" over {self.kv_dtype}"
        return f"{self.dtype}{over} {dims}, {self.rows} rows, {self.option}"


VARIANTS = tuple(
    Variant(*shape, rows, option)
    for n, shape in enumerate(SHAPES)
    for rows in (64, 128)
    for option in (OPTIONS if n == 0 else FEW)
)
SAMPLE = (Variant("bfloat16", "bfloat16", 128, 128, 128, "paged"),)


class Finding(NamedTuple):
    """What became of a variant.

    step: instructions of a step of the main loop without what is passed by where nothing is hidden, by opcode. masks:
    instructions that are passed by.
    """

    variant: Variant
    macros: dict[str, int]
    code: Code
    step: collections.Counter[str]
    masks: int
    seconds: float

    @property
    def dims(self) -> tuple[int, int]:
        kv_dtype = self.variant.kv_dtype
        return padded_head_dim(self.variant.dim, kv_dtype), padded_head_dim(self.variant.dim_v, kv_dtype)

    @property
    def widened(self) -> bool:
        return ELEMENTS[self.variant.kv_dtype].fp8

    @property
    def products(self) -> int:
        """HGMMA of a step: S, and O."""
        return (self.dims[0] + self.macros["BLOCK_N"]) // 16

    @property
    def stage(self) -> int:
        """Bytes of keys and values as they arrive."""
        return self.macros["BLOCK_N"] * sum(self.dims) * (1 if self.widened else 2)

    @property
    def in_flight(self) -> int:
        return (self.macros["STAGES"] - 1) * self.stage

    @property
    def shared(self) -> float:
        """Time of shared memory over that of memory: a stage arrives, and each consumer reads it.

        8 bits are read once more, and what they are widened to is twice as long.
        """
        consumers, columns = self.macros["BLOCK_M"] // 64, self.variant.dim + self.variant.dim_v
        memory = self.stage * columns / sum(self.dims) * H200.multiprocessors * H200.clock / H200.bandwidth
        moved = 2 + 2 * (1 + consumers) if self.widened else 1 + consumers
        return self.stage * moved / SHARED_BYTES_A_CLOCK / memory


@functools.cache
def source_of(variant: Variant) -> KernelSource:
    given: dict[str, Any] = {
        "dtype": variant.dtype,
        "kv_dtype": variant.kv_dtype,
        "descales": ELEMENTS[variant.kv_dtype].fp8,
        "out_dtype": ELEMENTS[variant.dtype].out,
        "head_dim": variant.dim,
        "head_dim_v": variant.dim_v,
        "compute": ELEMENTS[variant.dtype].computes[0],
        "heads_q": 8 * variant.rows,
    }
    key = emulated_decode.key_of(dataclasses.replace(BASE, **(given | OPTIONS[variant.option])), "sm_90a", NAME)
    assert key.row_tile == variant.rows
    return kernel_source(key)


@functools.cache
def examine(variant: Variant) -> Finding:
    source = source_of(variant)
    start = time.thread_time()
    cubin = Compiler().compile(source)
    seconds = time.thread_time() - start
    code = instructions_of(cubin.data)
    step, masks = step_of(code)
    macros = {name: int(value) for name, value in source.macros.items() if value.isdigit()}
    found = Code(cubin.resources[NAME], cubin.notes, "\n".join(text for _, text in code))
    return Finding(variant, macros, found, opcodes(step), masks, seconds)


def faults(found: Finding) -> list[str]:
    """What the gate holds against a variant."""
    plain, exact = found.variant.option in PLAIN, (found.variant.dim, found.variant.dim_v) == found.dims
    instructions, shared = found.step.total(), SHARED_WIDENED if found.widened else SHARED
    return code_faults(found.code, LAUNCH_REGISTERS[found.macros["WARPS"]]) + wrong(
        {
            f"{found.macros['SHARED_BYTES']} bytes of shared memory": found.macros["SHARED_BYTES"] > SHARED_LIMIT,
            f"{found.in_flight} bytes in flight": found.in_flight < IN_FLIGHT,
            f"{found.step['HGMMA']} instead of {found.products} HGMMA a step": found.step["HGMMA"] != found.products,
            "operands read by hand": any(found.step[name] for name in ("LDSM", "LDS", "LDG")),
            f"{instructions} instructions a step": plain and not found.widened and instructions > INSTRUCTIONS,
            f"shared memory takes {found.shared:.0%} of memory's time": exact and found.shared > shared,
        }
    )


@pytest.mark.parametrize("variant", SAMPLE, ids=str)
def test_a_sample_of_the_variants_passes_the_gate(variant: Variant) -> None:
    assert faults(examine(variant)) == []


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_every_variant_passes_the_gate() -> None:
    assert failing(examine, faults, VARIANTS) == {}


SEEDS = {
    "HGMMA": ("hopper_decode/consumer.cuh", "n < DIM / STEP; n++", "n < DIM / STEP - 1; n++"),
    "instructions": (
        "hopper_decode/softmax.cuh",
        "x = ptx::ex2(x * ",
        "for (int i = 0; i < 9; i++) x = x * 1.5f;\n      x = ptx::ex2(x * ",
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("fault", SEEDS)
def test_the_gate_sees_what_it_is_for(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seeded = with_bug(source_of(SAMPLE[0]), *SEEDS[fault])
    monkeypatch.setattr(sys.modules[__name__], "source_of", lambda variant: seeded)
    seen = faults(examine.__wrapped__(SAMPLE[0]))
    assert any(fault in text for text in seen), seen


def judge(variant: Variant) -> tuple[str, list[str]]:
    found = examine(variant)
    cells = (
        found.code.resources.registers, found.macros["SHARED_BYTES"], found.macros["STAGES"], found.in_flight >> 10,
        f"{found.step.total()} + {found.masks}", found.products, f"{found.shared:.0%}", f"{found.seconds:.2f}",
    )  # fmt: skip
    return " | ".join(map(str, cells)), faults(found)


def main() -> int:
    return write_page(
        VARIANTS,
        judge,
        "decode_sm90",
        ("registers", "bytes a block", "stages", "KiB in flight", "instructions", "products", "shared", "seconds"),
    )


if __name__ == "__main__":
    sys.exit(main())
