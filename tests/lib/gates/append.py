"""The rows of the append and page-copy kernels: registers for five blocks of 128 threads, and accesses of 16 bytes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

from gates.rows import Family, Plan, at_least, reader, rows_of
from inside.kernels import AppendProblem, append_variant, page_copy_variant
from support.gate import ARCHS

from gpu_actors import Rope

__all__ = ["APPEND", "PROBLEM"]

PROBLEM = AppendProblem(
    layout="paged",
    batch=2,
    total=2,
    heads_kv=2,
    head_dim=128,
    head_dim_v=128,
    dtype="bfloat16",
    cache_dtype="bfloat16",
    page_size=16,
    num_blocks=4,
    max_blocks=2,
)
REGISTERS = 102  # with which five blocks of 128 threads fit on a multiprocessor
WIDE = {"loads of 16 bytes": r"\bLDG\.E\.\S*128\b", "stores of 16 bytes": r"\bSTG\.E\.128\b"}

ROPES = {
    "no rope": {},
    "halves": {"rope": Rope(dim=128), "heads_q": 4},
    "interleaved": {"rope": Rope(dim=128, interleaved=True), "heads_q": 4},
    "part, tables": {"rope": Rope(dim=36, table_rows=9), "positions": True},
}
TYPES = {
    "bfloat16": {},
    "float16 to e4m3": {"dtype": "float16", "cache_dtype": "float8_e4m3fn", "descales": True},
    "bfloat16 to e5m2": {"cache_dtype": "float8_e5m2"},
    "float32": {"dtype": "float32", "cache_dtype": "float32"},
    "float32 to e4m3": {"dtype": "float32", "cache_dtype": "float8_e4m3fn", "descales": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    **{f"{t}, {r}": {**TYPES[t], **ROPES[r]} for t, r in itertools.product(TYPES, ROPES)},
    "pointers": {"layout": "pointers", "max_seq": 9},
    "dense": {"layout": "dense", "max_seq": 9},
    "256": {"head_dim": 256, "head_dim_v": 256, "rope": Rope(dim=256)},
    "80": {"head_dim": 80, "head_dim_v": 96},
    "float64": {"dtype": "float64", "cache_dtype": "float64"},
    "latent": {"head_dim": 64, "head_dim_v": 512, "rope": Rope(dim=64, interleaved=True), "latent": True},
    "fp8": {"dtype": "float8_e4m3fn", "cache_dtype": "float8_e4m3fn"},
}
PAGES = "pages"
SAMPLE = ("bfloat16, halves", "float32 to e4m3, part, tables", "pointers", PAGES)


class Variant(NamedTuple):
    """option: PAGES is the kernel that copies whole pages."""

    arch: str
    option: str

    def __str__(self) -> str:
        return f"{self.arch} {self.option}"


def plan(variant: Variant) -> Plan:
    if variant.option == PAGES:
        compiled = page_copy_variant(variant.arch)
    else:
        compiled = append_variant(dataclasses.replace(PROBLEM, **OPTIONS[variant.option]), variant.arch)
    return Plan(compiled.source, compiled.kernel, REGISTERS, dict.fromkeys(WIDE, at_least(1)), {}, reader(WIDE))


APPEND = Family(
    "append",
    rows_of(
        "append",
        [Variant(arch, option) for arch in ARCHS for option in (*OPTIONS, PAGES)],
        plan,
        [Variant(arch, SAMPLE[n % len(SAMPLE)]) for n, arch in enumerate(ARCHS)],
    ),
)
