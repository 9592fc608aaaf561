"""The rows of forward_simple, and of kernels for rows and keys with positions. They have no further limits."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from emulated.forward import key_of, ml_dtype, problem_of
from gates.rows import Family, Plan, plain_plan, rows_of
from inside.compiling import supported_archs
from inside.kernels import ELEMENTS, dispatch_key, example_problem, program_of
from support.gate import ARCHS

__all__ = ["FORWARD_SIMPLE", "POSITIONED"]


class Variant(NamedTuple):
    """A variant of forward_simple, whichever kernel the dispatcher would choose."""

    arch: str
    dtype: str
    option: str

    def __str__(self) -> str:
        return " ".join(self)


EVERYTHING: dict[str, Any] = {
    "causal": True,
    "window_size": (9, 9),
    "sink_tokens": 2,
    "alignment": "top_left",
    "softcap": 20.0,
    "alibi": "batch",
    "sinks": True,
    "bias": ("float32", True, True),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "everything": EVERYTHING,
    "everything, 256": {**EVERYTHING, "head_dim": 256, "head_dim_v": 256},
    "full": {},
    "varlen": {"layout": "varlen"},
    "window": {"window_size": (9, 9)},
    "window, sink tokens": {"window_size": (9, 9), "sink_tokens": 3},
    "softcap": {"softcap": 20.0},
    "alibi": {"alibi": "heads"},
    "sinks": {"sinks": True},
    "bias": {"bias": ("float32", True, True)},
    "own bias": {"bias": ("bfloat16", False, False)},
    "dropout": {"dropout_p": 0.1},
    "1/256": {"head_dim": 1, "head_dim_v": 256},
    "256/1": {"head_dim": 256, "head_dim_v": 1},
    "192/128": {"head_dim": 192, "head_dim_v": 128, "causal": True},
    "40": {"head_dim": 40, "head_dim_v": 40, "causal": True, "layout": "varlen"},
}


def simple_plan(variant: Variant) -> Plan:
    q = np.zeros((1, 64, 2, 128), ml_dtype(variant.dtype))
    fp8 = ELEMENTS[variant.dtype].fp8
    if variant.option.startswith("everything"):
        more: dict[str, Any] = {"dropout_p": 0.0 if fp8 else 0.1, "descales": fp8}
    else:
        more = {}
    problem = dataclasses.replace(problem_of(q, q, q), **OPTIONS[variant.option], **more)
    return plain_plan(dataclasses.replace(key_of(problem), arch=variant.arch), "forward_simple")


DTYPES_WITH = ("causal", "everything")
ALONE = [option for option in OPTIONS if option != "causal" and not option.startswith("everything")]
ALL_ARCHS = tuple(dict.fromkeys((*ARCHS, supported_archs()[-1])))
FORWARD_SIMPLE = Family(
    "forward_simple",
    rows_of(
        "forward_simple",
        [
            *(Variant(arch, dtype, option) for arch in ALL_ARCHS for dtype in ELEMENTS for option in DTYPES_WITH),
            *(Variant(arch, dtype, "everything, 256") for arch in ("sm_80", "sm_90a") for dtype in ELEMENTS),
            *(Variant("sm_90a", "bfloat16", option) for option in ALONE),
        ],
        simple_plan,
        [
            Variant("sm_80", "float16", "everything, 256"),
            Variant("sm_86", "float64", "everything"),
            Variant("sm_89", "float8_e5m2", "causal"),
            Variant("sm_90a", "bfloat16", "own bias"),
            Variant("sm_100a", "float32", "causal"),
            Variant("sm_120a", "float8_e4m3fn", "everything"),
            Variant(ALL_ARCHS[-1], "bfloat16", "causal"),
        ],
    ),
)


class Positioned(NamedTuple):
    """A kernel of a request whose rows and keys have positions."""

    arch: str
    direction: str
    options: str
    kernel: str

    def __str__(self) -> str:
        return f"{self.arch} {self.kernel} {self.direction} {self.options}"


POSITIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "dropout alibi window": {"dropout_p": 0.5, "alibi": "heads", "window_size": (64, 0)},
}


def positioned_keys(arch: str, direction: Any, options: str) -> dict[str, Any]:
    fields = {"causal": True, "q_positions": 2, "k_positions": 2, "return_lse": direction == "forward"}
    problem = example_problem("bfloat16", 64, direction=direction, **fields, **POSITIONS[options])
    return {key.kernel: key for key in program_of(problem, dispatch_key(problem, arch)).keys}


def positioned_plan(variant: Positioned) -> Plan:
    return plain_plan(positioned_keys(*variant[:3])[variant.kernel], variant.kernel)


_POSITIONED = [
    Positioned(arch, direction, options, kernel)
    for arch in ("sm_80", "sm_90a")
    for direction in ("forward", "backward")
    for options in POSITIONS
    for kernel in positioned_keys(arch, direction, options)
]
POSITIONED = Family(
    "positioned",
    rows_of("positioned", _POSITIONED, positioned_plan, [row for row in _POSITIONED if row.options != "causal"][::3]),
)
