"""Which kernel family takes which option on which architecture: one table, for docs and for `explain`.

Every cell comes from the checks that requests go through. docs/reports/options.md is the printed table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from gpu_actors.attention.key_mask import KeyMask
from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.attention.requests import FlashForward, PagedForward
from gpu_actors.attention.score_mod import ScoreMod
from gpu_actors.kernels.dispatch import (
    FAMILIES,
    REFERENCE,
    WITHOUT_CHUNKS,
    WITHOUT_TMA,
    Barred,
    Verdict,
    explain,
    family_of,
)
from gpu_actors.kernels.family import KernelFamily
from gpu_actors.kernels.support import ELEMENTS, example_problem, find_unsupported

__all__ = ["OPTIONS", "Explanation", "OptionCell", "explain_problem", "option_cell", "options_of"]

# Fields that ask for nothing alone, or that belong to another row.
_NO_ROWS: tuple[str, ...] = (
    "descales",
    "page_size",
    "varlen_q",
    "bias_row",
    "bias_keys",
    "dropout_first_head",
    "dropout_heads",
    "q_positions",
    "k_positions",
    "own_layouts",
)


def _rows_of_fields() -> dict[str, dict[str, Any]]:
    """A row for each flag and number of a problem that is off by default, so that a new one has a row at once."""
    masks = {field.name for field in dataclasses.fields(KeyMask)}
    rows: dict[str, dict[str, Any]] = {"`window_size`": {"window_size": (128, 0)}}
    for field in dataclasses.fields(AttentionProblem):
        sample = {bool: True, int: 4, float: 0.1}.get(type(field.default))
        if sample is None or field.name in _NO_ROWS:
            continue
        beside: dict[str, Any] = {"alibi": "heads"} if field.name.startswith("alibi") else {}
        if field.name in masks and sample == 4:
            beside = rows["`window_size`"]
        rows[f"`{field.name}`"] = {**beside, field.name: sample}
    return {**rows, "`alibi_slopes`": {"alibi": "heads"}}


_OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    **_rows_of_fields(),
    '`alignment="top_left"`': {"causal": True, "alignment": "top_left"},
    "`bias`": {"bias": ("bfloat16", False, False)},
    "`bias`, one row": {"bias": ("bfloat16", False, False), "bias_row": True},
    "`bias`, a mask": {"bias": ("bool", False, False)},
    "`decode` over arrays of several layouts": {"layout": "pointers", "own_layouts": True},
    "`q_positions`, `k_positions`": {"q_positions": 2, "k_positions": 2},
    "gradients of one `k` and `v` for a batch": {"summed": "kv"},
    '`out_dtype="float32"`': {"out_dtype": "float32"},
    "a graph's `score_mod`": {"score_mod": ScoreMod("")},
    "a graph's `block_mask`": {"score_mod": ScoreMod("", block_size=(128, 128))},
    "float16": {"dtype": "float16", "kv_dtype": "float16", "out_dtype": "float16"},
    "float32": {"dtype": "float32", "kv_dtype": "float32", "out_dtype": "float32", "compute": "f32"},
    'float32, `compute="tf32"`': {"dtype": "float32", "kv_dtype": "float32", "out_dtype": "float32", "compute": "tf32"},
    "float64": {"dtype": "float64", "kv_dtype": "float64", "out_dtype": "float64", "compute": "f64"},
    'float64, `lse_dtype="float64"`': {
        **dict.fromkeys(("dtype", "kv_dtype", "out_dtype", "lse_dtype"), "float64"),
        "compute": "f64",
    },
    "float8_e4m3fn": {"dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn", "compute": "fp8", "descales": True},
    "float8_e5m2": {"dtype": "float8_e5m2", "kv_dtype": "float8_e5m2", "compute": "fp8", "descales": True},
    "a cache in float8_e4m3fn": {"kv_dtype": "float8_e4m3fn", "descales": True},
    "head dim 40": {"head_dim": 40, "head_dim_v": 40},
    "head dim 20": {"head_dim": 20, "head_dim_v": 20},
    "head dim 256": {"head_dim": 256, "head_dim_v": 256},
    "head dim 512": {"head_dim": 512, "head_dim_v": 512},
}

OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(_OPTIONS)
"""Every row of the table: the fields of an `AttentionProblem` that ask for the option."""

# Options of one direction or one kind of layout alone.
_ONLY = {
    "deterministic": "backward",
    "summed": "backward",
    "return_lse": "forward",
    "tree_mask": "cache",
    "num_splits": "cache",
}
_ONLY |= dict.fromkeys(("score_max", "score_sum_exp"), "forward")
_ONLY |= dict.fromkeys(("cache_batch_idx", "cache_leftpad", "own_layouts", "latent"), "cache")
_WHERE = {"backward": "without gradients", "cache": "of dense and packed batches"}
_OF_BATCHES = (
    {field.name for field in dataclasses.fields(FlashForward)}
    - {field.name for field in dataclasses.fields(PagedForward)}
    - {"dtype"}
)


class OptionCell(NamedTuple):
    """Whether a family takes an option on an architecture.

    option: its row in docs/reports/options.md. reason: a sentence: why not, or what a family that takes it is for.
    """

    option: str
    family: str
    arch: str
    taken: bool
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """Why a request gets its kernel.

    key: what `inspect_key` returns, None if no kernel takes the request. verdicts: one for each family, in the order in
    which the families are asked. options: the cells of docs/reports/options.md for the options of this request and the
    families of its kind. str() shows all three.
    """

    key: DispatchKey | None
    verdicts: tuple[Verdict, ...]
    options: tuple[OptionCell, ...]

    def __str__(self) -> str:
        lines = [f"kernel: {'none' if self.key is None else f'{self.key.kernel} ({self.key.arch})'}"]
        lines += [f"  {'takes it' if v.taken else 'no'}  {v.family}: {v.reason}" for v in self.verdicts]
        for option in dict.fromkeys(cell.option for cell in self.options):
            lines.append(f"option {option}")
            own = [cell for cell in self.options if cell.option == option]
            lines += [f"  {'yes' if cell.taken else 'no'}  {cell.family}: {cell.reason}" for cell in own]
        return "\n".join(lines)


def explain_problem(
    problem: AttentionProblem, arch: str, key: DispatchKey | None, barred: Barred | None = None
) -> Explanation:
    """Explain the kernel of a problem. key: what answers it, or None. barred: as for `dispatch_key`."""
    verdicts = explain(problem, arch, barred=barred)
    if key is not None and key.kernel == REFERENCE.name:
        verdicts.append(Verdict(REFERENCE.name, True, REFERENCE.reason))
    elif key is not None and Verdict(key.kernel, True, family_of(key).reason) not in verdicts:
        verdicts = _moved(problem, arch, WITHOUT_TMA, barred)
        if not any(verdict.taken and verdict.family == key.kernel for verdict in verdicts):
            verdicts = _moved(problem, arch, WITHOUT_CHUNKS, barred)
    kinds = [family for family in FAMILIES if _is_of_kind(family, problem)]
    cells = [option_cell(name, family, arch) for name in options_of(problem) for family in kinds]
    return Explanation(key, tuple(verdicts), tuple(cells))


def _moved(
    problem: AttentionProblem, arch: str, families: tuple[KernelFamily, ...], barred: Barred | None
) -> list[Verdict]:
    """The verdicts on all families, if only ``families`` can read operands where they lie."""
    others = iter(explain(problem, arch, families, barred))
    why = {True: "TMA cannot move operands that lie as these do", False: "rows of the cache begin between its chunks"}
    return [next(others) if family in families else Verdict(family.name, False, why[family.tma]) for family in FAMILIES]


def options_of(problem: AttentionProblem) -> list[str]:
    """The rows of the table that a problem asks for, in the table's order; "none" if it asks for nothing."""
    found = {name: set(fields.items()) for name, fields in OPTIONS.items() if fields and _asks(problem, fields)}
    # A row of several fields replaces the rows of some of these fields.
    return [name for name, own in found.items() if not any(own < other for other in found.values())] or ["none"]


def option_cell(option: str, family: KernelFamily, arch: str) -> OptionCell:
    """The cell for a request of bfloat16 and head dim 64 in the layout that the family is for."""
    reason = _refusal(OPTIONS[option], family, arch)
    return OptionCell(option, family.name, arch, reason is None, family.reason if reason is None else reason)


_USUAL = example_problem("bfloat16", 64)
_DTYPES = ("dtype", "kv_dtype", "out_dtype", "compute")


def _asks(problem: AttentionProblem, fields: Mapping[str, Any]) -> bool:
    if "q_positions" in fields:
        return problem.positions
    if "bias_row" in fields:
        return problem.bias_row
    typed = bool(fields.keys() & {"dtype", "kv_dtype"})
    return all(_asks_for(problem, name, value) for name, value in fields.items() if not (typed and name == "descales"))


def _asks_for(problem: AttentionProblem, name: str, value: Any) -> bool:
    own = getattr(problem, name)
    if name in (*_DTYPES, "head_dim", "head_dim_v", "alignment"):
        return bool(own == value)
    if name == "bias":
        return own is not None and (own[0] == "bool") == (value[0] == "bool")
    if name == "score_mod":
        return own is not None and (own.block_size is None) == (value.block_size is None)
    return bool(own != getattr(_USUAL, name))


def _is_of_kind(family: KernelFamily, problem: AttentionProblem) -> bool:
    return family.direction in (None, problem.direction) and (not family.layouts or problem.layout in family.layouts)


def _refusal(fields: Mapping[str, Any], family: KernelFamily, arch: str) -> str | None:
    cached = "dense" not in (family.layouts or ("dense",))
    for name, kind in _ONLY.items():
        if name in fields and kind not in (family.direction or "forward", "cache" if cached else "dense"):
            return f"there is no such option {'with gradients' if kind == 'forward' else _WHERE[kind]}"
    dtype = fields.get("dtype", "bfloat16")
    asked = {name for name in fields if name != "compute" or fields[name] != ELEMENTS[dtype].computes[0]}
    if cached and asked & _OF_BATCHES:
        return "requests over caches have no such option"
    usual: dict[str, Any] = {"direction": family.direction or "forward"}
    if cached:
        usual |= {"layout": "cache", "seqlen_q": 4, "total_q": 4, "heads_q": 4}
    if fields.get("kv_dtype") != fields.get("dtype", "bfloat16") and "kv_dtype" in fields and not cached:
        return "a cache belongs to requests over caches"
    given = {**usual, **fields}
    problem = example_problem(given.pop("dtype", "bfloat16"), given.pop("head_dim", 64), **given)
    found = find_unsupported(problem, arch)
    error = family.refusal(problem, arch) if found is None else found[1]
    return None if error is None else str(error.reason)
