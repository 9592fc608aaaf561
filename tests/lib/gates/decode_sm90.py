"""The rows of decode_sm90.

Besides the limits of every row:

- as many products (HGMMA) in a step of the main loop as the tile has, and no loads;
- at least 128 KiB on their way to a multiprocessor while a stage is multiplied;
- over 16-bit caches, with the scale alone between product and score, at most 250 instructions a step and warp;
- at head dims that fill their boxes, at most 50% of memory's time in shared memory, or 125% over 8-bit caches, which
  are widened there.

Instructions are counted for a step without a mask; those of masks are counted apart. Shared memory's time is computed:
the bytes that arrive by TMA, that are widened, and that each warpgroup's products read, at 128 bytes a clock, over the
time in which an H200's memory (4.8 TB/s) delivers the same keys.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from emulated import decode as emulated_decode
from gates.decode import BASE
from gates.hopper import ARCH, REGISTERS, SHARED_BYTES_A_CLOCK, SHARED_LIMIT
from gates.rows import SHARED, Family, Plan, at_least, at_most, dims_of, exactly, numbers_of, rows_of
from inside.kernels import ELEMENTS, NAME, padded_head_dim
from support.gate import Code, kernel_source
from support.hopper_sass import instructions_of, opcodes, step_of

from benchmarks.model import MACHINES

__all__ = ["DECODE_SM90"]

H200 = MACHINES[ARCH]
INSTRUCTIONS = 250  # of a step without a mask, with only the scale between product and score
SHARED_TIME, SHARED_TIME_WIDENED = 0.5, 1.25  # of memory's time: for 16-bit caches, and for 8-bit ones
IN_FLIGHT = 128 << 10  # bytes on their way while a stage is multiplied
FLIGHT, STEP, TIME = "bytes in flight", "instructions a step", "shared memory's time"
LOADS = ("LDSM", "LDS", "LDG")

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

    @property
    def arch(self) -> str:
        return ARCH

    def __str__(self) -> str:
        over = "" if self.kv_dtype == self.dtype else f" over {self.kv_dtype}"
        return f"{self.dtype}{over} {dims_of(self.dim, self.dim_v)}, {self.rows} rows, {self.option}"


def plan(variant: Variant) -> Plan:
    widened = ELEMENTS[variant.kv_dtype].fp8
    fields: dict[str, Any] = {
        "dtype": variant.dtype,
        "kv_dtype": variant.kv_dtype,
        "descales": widened,
        "out_dtype": ELEMENTS[variant.dtype].out,
        "head_dim": variant.dim,
        "head_dim_v": variant.dim_v,
        "compute": ELEMENTS[variant.dtype].computes[0],
        "heads_q": 8 * variant.rows,
    }
    key = emulated_decode.key_of(dataclasses.replace(BASE, **(fields | OPTIONS[variant.option])), ARCH, NAME)
    assert key.row_tile == variant.rows
    source = kernel_source(key)
    number = numbers_of(source)

    dims = tuple(padded_head_dim(dim, variant.kv_dtype) for dim in (variant.dim, variant.dim_v))
    stage = number["BLOCK_N"] * sum(dims) * (1 if widened else 2)  # bytes of keys and values as they arrive
    # A stage arrives, and each consumer reads it. A stage of 8 bits is read once more, written at twice the size, and
    # each consumer reads that.
    consumers, columns = number["BLOCK_M"] // 64, variant.dim + variant.dim_v
    memory = stage * columns / sum(dims) * H200.multiprocessors * H200.clock / H200.bandwidth
    moved = 2 + 2 * (1 + consumers) if widened else 1 + consumers

    limits = {
        SHARED: at_most(SHARED_LIMIT),
        FLIGHT: at_least(IN_FLIGHT),
        "HGMMA a step": exactly((dims[0] + number["BLOCK_N"]) // 16),  # of S, and of O
        **dict.fromkeys(LOADS, exactly(0)),
    }
    if variant.option in PLAIN and not widened:
        limits[STEP] = at_most(INSTRUCTIONS)
    if (variant.dim, variant.dim_v) == dims:
        limits[TIME] = at_most(SHARED_TIME_WIDENED if widened else SHARED_TIME)

    def read(code: Code) -> dict[str, float]:
        assert code.text is not None
        step, masks = step_of(instructions_of(code.text))
        counted = opcodes(step)
        return {
            "HGMMA a step": counted["HGMMA"],
            STEP: counted.total(),
            "instructions of masks": masks,
            **{name: counted[name] for name in LOADS},
        }

    given = {
        SHARED: number["SHARED_BYTES"],
        "stages": number["STAGES"],
        FLIGHT: (number["STAGES"] - 1) * stage,
        TIME: stage * moved / SHARED_BYTES_A_CLOCK / memory,
    }
    return Plan(source, NAME, REGISTERS[number["WARPS"]], limits, given, read)


DECODE_SM90 = Family(
    "decode_sm90",
    rows_of(
        "decode_sm90",
        [
            Variant(*shape, rows, option)
            for n, shape in enumerate(SHAPES)
            for rows in (64, 128)
            for option in (OPTIONS if n == 0 else FEW)
        ],
        plan,
        [Variant("bfloat16", "bfloat16", 128, 128, 128, "paged")],
    ),
)
