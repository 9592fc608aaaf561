"""Which kernel takes which option on which architecture, from the checks that requests go through.

python scripts/options.py            prints docs/reports/options.md
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_actors.kernels.dispatch import FAMILIES
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.support import example_problem, find_unsupported
from gpu_actors.requests import FlashForward, PagedForward
from gpu_actors.score_mod import ScoreMod

ARCHS = ("sm_80", "sm_90a")
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "`causal`": {"causal": True},
    "`window_size`": {"window_size": (128, 0)},
    "`sink_tokens`": {"window_size": (128, 0), "sink_tokens": 4},
    "`attention_chunk`": {"causal": True, "attention_chunk": 128},
    '`alignment="top_left"`': {"causal": True, "alignment": "top_left"},
    "`softcap`": {"softcap": 30.0},
    "`alibi_slopes`": {"alibi": "heads"},
    "`alibi_signed`": {"alibi": "heads", "alibi_signed": True},
    "`sinks`": {"sinks": True},
    "`bias`": {"bias": ("bfloat16", False, False)},
    "`bias`, one row": {"bias": ("bfloat16", False, False), "bias_row": True},
    "`bias`, a mask": {"bias": ("bool", False, False)},
    "`dropout_p`": {"dropout_p": 0.1},
    "`q_positions`, `k_positions`": {"q_positions": 2, "k_positions": 2},
    '`out_dtype="float32"`': {"out_dtype": "float32"},
    "a graph's `score_mod`": {"score_mod": ScoreMod("")},
    "a graph's `block_mask`": {"score_mod": ScoreMod("", block_size=(128, 128))},
    "`return_lse`": {"return_lse": True},
    "`deterministic`": {"deterministic": True},
    "`tree_mask`": {"tree_mask": True},
    "`num_splits`": {"num_splits": 4},
    "float16": {"dtype": "float16", "kv_dtype": "float16", "out_dtype": "float16"},
    "float32": {"dtype": "float32", "kv_dtype": "float32", "out_dtype": "float32", "compute": "f32"},
    'float32, `compute="tf32"`': {"dtype": "float32", "kv_dtype": "float32", "out_dtype": "float32", "compute": "tf32"},
    "float64": {"dtype": "float64", "kv_dtype": "float64", "out_dtype": "float64", "compute": "f64"},
    "float8_e4m3fn": {"dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn", "compute": "fp8", "descales": True},
    "float8_e5m2": {"dtype": "float8_e5m2", "kv_dtype": "float8_e5m2", "compute": "fp8", "descales": True},
    "a cache in float8_e4m3fn": {"kv_dtype": "float8_e4m3fn", "descales": True},
    "head dim 40": {"head_dim": 40, "head_dim_v": 40},
    "head dim 20": {"head_dim": 20, "head_dim_v": 20},
    "head dim 256": {"head_dim": 256, "head_dim_v": 256},
}
# Of one direction or one kind of layout alone.
_ONLY = {"deterministic": "backward", "return_lse": "forward", "tree_mask": "cache", "num_splits": "cache"}


def page() -> str:
    """The text of docs/reports/options.md."""
    reasons: dict[str, int] = {}
    heads = [f"{family.name} {arch}" for family in FAMILIES for arch in ARCHS]
    lines = [f"| option | {' | '.join(heads)} |", f"|---{'|---' * len(heads)}|"]
    for name, fields in OPTIONS.items():
        cells = [_cell(family, arch, fields, reasons) for family in FAMILIES for arch in ARCHS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}." for reason, number in reasons.items()]
    return f"{_HEAD}\n{chr(10).join(lines)}\n\n{_NOTES}\n\n{chr(10).join(notes)}\n"


_HEAD = """# Options by kernel and architecture

In a clone, `python scripts/options.py` makes this page from the checks that requests go through: each option with a
request of bfloat16 and head dim 64, in the layout that a kernel is for. An x is a kernel that takes it; a number is
the reason for which it does not. A request that one kernel refuses goes to the next one of its kind. sm_86 and sm_89
take what sm_80 takes. Blackwell takes that too, and fp8 by forward_simple.
"""
_NOTES = "## Reasons"


def _cell(family: KernelFamily, arch: str, fields: dict[str, Any], reasons: dict[str, int]) -> str:
    cached = "dense" not in (family.layouts or ("dense",))
    for name, kind in _ONLY.items():
        if name in fields and kind not in (family.direction or "forward", "cache" if cached else "dense"):
            return _number(
                f"There is no such option {'with gradients' if kind == 'forward' else _WHERE[kind]}", reasons
            )
    if cached and fields.keys() & _OF_BATCHES:
        return _number("Requests over caches have no such option", reasons)
    usual: dict[str, Any] = {"direction": family.direction or "forward"}
    if cached:
        usual |= {"layout": "cache", "seqlen_q": 4, "total_q": 4, "heads_q": 4}
    if fields.get("kv_dtype") != fields.get("dtype", "bfloat16") and "kv_dtype" in fields and not cached:
        return _number("A cache belongs to requests over caches", reasons)
    given = usual | fields
    problem = example_problem(given.pop("dtype", "bfloat16"), given.pop("head_dim", 64), **given)
    found = find_unsupported(problem, arch)
    error = family.refusal(problem, arch) if found is None else found[1]
    return "x" if error is None else _number(str(error.reason), reasons)


_OF_BATCHES = (
    {field.name for field in dataclasses.fields(FlashForward)}
    - {field.name for field in dataclasses.fields(PagedForward)}
    - {"dtype"}
)
_WHERE = {"backward": "without gradients", "cache": "of dense and packed batches"}


def _number(reason: str, reasons: dict[str, int]) -> str:
    return str(reasons.setdefault(reason[0].upper() + reason[1:], len(reasons) + 1))


if __name__ == "__main__":
    sys.stdout.write(page())
