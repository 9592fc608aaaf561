"""The rows of the merge of partials and of its gradient: registers for five or four blocks, accesses of 16 bytes."""

from __future__ import annotations

from typing import Any

from gates.append import WIDE
from gates.rows import Family, Plan, at_least, reader, rows_of
from inside.kernels import MergeGradientKey, MergeKey, kernel_source, merge_variants
from support.gate import ARCHS

__all__ = ["MERGE"]

REGISTERS = {"merge": 102, "merge_gradients": 128}  # five and four blocks of 128 threads on a multiprocessor
# Of partials and of the result or its gradient, and whether there are sinks.
MORE = (("float16", "float16", True), ("float64", "float64", True))
GRADIENTS = (
    ("float32", "float32", True),
    ("float64", "float64", True),
    ("bfloat16", "bfloat16", False),
    ("float32", "bfloat16", False),
)


def merge_of(arch: str, dtype: str, out_dtype: str, sinks: bool) -> MergeKey:
    return MergeKey(arch=arch, dtype=dtype, lse_dtype="float32", out_dtype=out_dtype, sinks=sinks)


def gradient_of(arch: str, dtype: str, out_dtype: str, sinks: bool, sum_sinks: bool = False) -> MergeGradientKey:
    kind: dict[str, Any] = {"dtype": dtype, "lse_dtype": "float32", "out_dtype": out_dtype}
    return MergeGradientKey(arch=arch, **kind, sinks=sinks, sum_sinks=sum_sinks)


def variants(arch: str) -> list[Any]:
    sums = [gradient_of(arch, *kind, sum_sinks=True) for kind in GRADIENTS if kind[2]]
    merges = [*merge_variants(arch), *(merge_of(arch, *kind) for kind in MORE)]
    return [*merges, *(gradient_of(arch, *kind) for kind in GRADIENTS), *sums]


def plan(key: Any) -> Plan:
    wide = "float64" not in (key.dtype, key.out_dtype) and not getattr(key, "sum_sinks", False)
    limits = dict.fromkeys(WIDE, at_least(1)) if wide else {}
    return Plan(kernel_source(key), key.kernel, REGISTERS[key.kernel], limits, {}, reader(WIDE))


MERGE = Family(
    "merge",
    rows_of(
        "merge",
        [key for arch in ARCHS for key in variants(arch)],
        plan,
        [
            merge_of("sm_80", *MORE[0]),
            merge_of("sm_90a", *MORE[1]),
            gradient_of("sm_80", *GRADIENTS[0], sum_sinks=True),
            gradient_of("sm_90a", *GRADIENTS[2]),
        ],
    ),
)
