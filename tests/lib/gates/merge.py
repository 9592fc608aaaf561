"""The rows of the merge of partials and of its gradient: registers for five or four blocks, accesses of 16 bytes."""

from __future__ import annotations

from typing import Any

from gates.append import WIDE
from gates.rows import Family, Plan, at_least, reader, rows_of
from inside.compiling import Variant
from inside.kernels import example_merge, merge_gradient_variants, merge_variant, merge_variants
from support.gate import ARCHS

__all__ = ["MERGE"]

REGISTERS = {"merge": 102, "merge_gradients": 128}  # five and four blocks of 128 threads on a multiprocessor
# The dtypes of partials, of the result or its gradient, and of sinks.
MORE = (("float16", "float16", "float32"), ("float64", "float64", "float32"))
GRADIENTS = (
    ("float32", "float32", "float32"),
    ("float64", "float64", "float32"),
    ("bfloat16", "bfloat16", None),
    ("float32", "bfloat16", None),
)


def merge_of(arch: str, *kind: Any) -> Variant:
    return merge_variant(example_merge(*kind), arch)


def gradients_of(arch: str, *kind: Any) -> tuple[Variant, ...]:
    return merge_gradient_variants(example_merge(*kind), arch)


def variants(arch: str) -> list[Variant]:
    merges = [*merge_variants(arch), *(merge_of(arch, *kind) for kind in MORE)]
    return [*merges, *(variant for kind in GRADIENTS for variant in gradients_of(arch, *kind))]


def plan(variant: Variant) -> Plan:
    macros = variant.macros
    wide = "double" not in (macros["ELEMENT"], macros["OUT_ELEMENT"]) and "SUM_SINKS" not in macros
    limits = dict.fromkeys(WIDE, at_least(1)) if wide else {}
    return Plan(variant.source, variant.kernel, REGISTERS[variant.kernel], limits, {}, reader(WIDE))


MERGE = Family(
    "merge",
    rows_of(
        "merge",
        [variant for arch in ARCHS for variant in variants(arch)],
        plan,
        [
            merge_of("sm_80", *MORE[0]),
            merge_of("sm_90a", *MORE[1]),
            gradients_of("sm_80", *GRADIENTS[0])[1],
            gradients_of("sm_90a", *GRADIENTS[2])[0],
        ],
    ),
)
