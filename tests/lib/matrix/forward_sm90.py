"""Hard problems of forward_sm90."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cases.finite_masks import hide_first
from cases.forward_edges import EDGES, edge_case
from cases.large_scores import LARGE, check_large
from cases.poison import poison_unseen
from cases.positions import PLACED, placed_case
from cases.score_mods import MODIFICATIONS
from cases.steady_scores import check_steady
from emulated.contraction import like_hardware
from emulated.far_tensors import check_far
from emulated.forward import OPERANDS, check_case, gaussian, problem_of
from emulated.forward import run as run_kernel
from emulated.modified import check_modified, check_modified_nonfinite, modified_case
from emulated.sweeps import LAUNCHES as MODES
from emulated.sweeps import Sweep, case_of, launch_of
from inside.kernels import forward_sm90 as sm90_kernel
from inside.testing import SEQLENS

from gpu_actors.testing import ForwardCase, check_output, random_forward

_KERNEL = "forward_sm90"
LAUNCHES = (
    ("late", "greedy", 0),
    ("eager", "lane", 1),
    ("random", "random", 2),
    ("late", "lane", 1),
    ("eager", "greedy", 1),
    ("late", "random", 3),
)

# More tiles of keys than stages, more tiles of rows than the two blocks, rows and keys that end inside a tile.
_SHAPE: dict[str, Any] = {
    "dtype": "float16",
    "head_dim": 64,
    "varlen": False,
    "batch": 1,
    "heads": (2, 1),
    "features": (),
}
_PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": {"seqlens": (400, 700), "kind": "peaked"},
    "outlier": {"seqlens": (200, 700), "kind": "outlier"},
    "causal": {"head_dim": 128, "dtype": "bfloat16", "seqlens": (300, 600), "always": ("causal",)},
    "empty": {"seqlens": (1500, 21), "heads": (1, 1), "always": ("causal",)},
    "few": {"seqlens": (300, 21), "always": ("causal",)},
    "one key": {"seqlens": (300, 1), "always": ("causal",)},
    "batch": {"seqlens": (200, 300), "batch": 3, "heads": (4, 2), "kind": "gaussian"},
    "sections": {"seqlens": (200, 70), "heads": (14, 7)},
    "varlen": {"seqlens": (300, 500), "varlen": True, "batch": 4, "always": ("causal",)},
    "long": {"seqlens": (500, 300), "varlen": True, "batch": 2},
    "window": {"seqlens": (400, 600), "always": ("window", "sink_tokens"), "alignment": "top_left"},
    "sink tokens": {"seqlens": (400, 300), "always": ("causal", "window", "sink_tokens")},
    "right edge": {"seqlens": (400, 600), "always": ("causal", "window")},
    "wide": {"head_dim": 256, "seqlens": (140, 350), "kind": "peaked"},
    "narrow": {"head_dim": 96, "seqlens": (130, 300)},
    "narrow values": {"head_dim": 96, "head_dim_v": 64, "seqlens": (113, 203), "always": ("causal",)},
    "narrow keys": {"head_dim": 64, "head_dim_v": 96, "seqlens": (113, 203), "always": ("causal",)},
    "direct": {"head_dim": 128, "seqlens": (300, 500)},
    "direct varlen": {"head_dim": 256, "seqlens": (300, 300), "varlen": True, "batch": 5, "always": ("causal",)},
    "direct narrow": {"head_dim": 136, "seqlens": (140, 300)},
    "direct nonfinite": {"head_dim": 256, "seqlens": (140, 200), "always": ("causal",)},
    "plain alibi": {"seqlens": (200, 300), "always": ("alibi",)},
    "softcap": {"seqlens": (200, 300), "always": ("softcap",)},
    "signed alibi": {"seqlens": (200, 300), "always": ("alibi",)},
    "dropout": {"seqlens": (200, 300), "batch": 2, "always": ("dropout",)},
    "nonfinite, dropped": {"seqlens": (200, 200), "always": ("causal", "dropout")},
    "bias": {"seqlens": (200, 300), "batch": 2, "always": ("bias",)},
    "odd bias": {"seqlens": (200, 301), "always": ("bias",)},
    "capped bias": {"seqlens": (200, 300), "always": ("bias", "softcap")},
    "mask": {"seqlens": (200, 300), "always": ("bias",)},
    "hidden": {"seqlens": (200, 300), "always": ("bias",)},
    "nonfinite": {"seqlens": (200, 200), "always": ("causal",)},
}  # fmt: skip
# Bytes of L2 that the kernel assumes: ten heads of fourteen, so that sections have eight and six.
_SECTIONS = {"sections": 5 * 70 * 256}
# Options in place of the drawn ones. Windows end inside tiles.
_OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window_size": (150, 30), "sink_tokens": 5},
    "sink tokens": {"window_size": (40, 200), "sink_tokens": 140},
    "right edge": {"window_size": (500, 300)},
    "signed alibi": {"alibi_signed": True},
}
_MODIFIED = ("document mask", "local and global", "prefix lm", "checkerboard", "soft cap", "tanh gating")
KERNELS = (_KERNEL,)
ROWS = (
    *_PROBLEMS,
    *EDGES,
    *PLACED,
    *LARGE,
    *_MODIFIED,
    "nonfinite, modified",
    "causal, like hardware",
    "neighbours",
    "far",
    "steady",
    "steady in every mode",
)
RARE = frozenset(
    {
        "batch",
        "long",
        "window",
        "right edge",
        "direct varlen",
        "direct narrow",
        "direct nonfinite",
        "capped bias",
        "plain alibi",
        *EDGES[1:],
        *(row for row in PLACED if row not in ("steps", "chunks of positions")),
        "low with sinks",
        "steep",
        "local and global",
        "prefix lm",
        "checkerboard",
        "soft cap",
        "tanh gating",
        "nonfinite, modified",
        "steady in every mode",
    }
)


def _case_of(row: str) -> ForwardCase:
    if row in EDGES:
        return edge_case(row, "float16", 64)
    if row in PLACED:
        return placed_case(row, "bfloat16", 64, 150, 300)
    case = random_forward(len(row), **{**_SHAPE, **_PROBLEMS[row]})
    case = dataclasses.replace(case, options={**case.options, **_OPTIONS.get(row, {})})
    case = poison_unseen(case)
    if "nonfinite" in row:
        case.v[0, 100, :, 3::59] = np.inf if "dropped" in row else np.nan
    if row == "hidden":
        case.options["bias"] = hide_first(case.options["bias"])
    if row == "mask":
        case.options["bias"] = case.options["bias"] > -0.5
    return case


def run(row: str) -> None:
    """Raise AssertionError or EmulationFault if the row shows a difference."""
    if row == "causal, like hardware":
        with like_hardware():
            run("causal")
        return
    if row == "far":
        for axis in range(3):
            check_far(_KERNEL, axis)
        return
    if row == "steady":
        check_steady(_KERNEL, "bfloat16")
        return
    if row in LARGE:
        check_large(row, _KERNEL, "bfloat16", 64, "sm_90a")
        return
    for delivery, schedule, seed in LAUNCHES:
        _run_launch(row, delivery, schedule, seed)


def _run_launch(row: str, delivery: Any, schedule: Any, seed: int) -> None:
    launch: dict[str, Any] = {"kernel": _KERNEL, "delivery": delivery, "schedule": schedule, "seed": seed}
    if row == "neighbours":
        check_neighbours("float16", 70, causal=True, **launch)
        return
    if row == "steady in every mode":
        check_steady(**launch)
        return
    if row in MODIFICATIONS:
        check_modified(modified_case(row, "float16", seed, 64, 150, 300, causal=False), causal=False, **launch)
        return
    if row == "nonfinite, modified":
        check_modified_nonfinite(**launch)
        return
    case = _case_of(row)
    problem = problem_of(*case.inputs, **case.options)
    if row == "long":  # as if the caller gave too small a length
        problem = dataclasses.replace(problem, seqlen_q=100)
    operands = dict(zip("qkv", case.inputs, strict=True))
    operands |= {name: case.options[name] for name in OPERANDS if name in case.options}
    with pytest.MonkeyPatch.context() as patch:
        if row in _SECTIONS:
            patch.setattr(sm90_kernel, "_L2_BYTES", _SECTIONS[row])
        out, lse = run_kernel(
            problem,
            operands,
            dropout_seed=case.options.get("dropout_seed", 0),
            multiprocessors=2,
            limit_seconds=60.0,
            **launch,
        )
    check_output(out, lse, *case.inputs, repro=case.repro, **case.options)


def check_neighbours(dtype: str, rows: int, *, causal: bool, **launch: Any) -> None:
    """A packed sequence of so many rows keeps its bits if the next one holds NaN."""
    ends = {name: np.array([0, rows, rows + 100], np.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    arrays = {name: gaussian(n, (rows + 100, 2, 64), dtype) for n, name in enumerate("qkv")}
    problem = problem_of(*arrays.values(), causal=causal, **ends)
    clean, clean_lse = run_kernel(problem, {**arrays, **ends}, **launch)
    for array in arrays.values():
        array[rows:] = np.nan
    out, lse = run_kernel(problem, {**arrays, **ends}, **launch)
    assert (out[:rows] == clean[:rows]).all(), "out differs"
    assert (lse[:, :rows] == clean_lse[:, :rows]).all(), "lse differs"
    assert np.isnan(out[rows:]).all(), "out differs"


# Every option alone or combined, every row of the tile table, both layouts, both alignments.
SWEEPS = (
    Sweep("float16", 64, None, ""),
    Sweep("bfloat16", 128, None, "causal"),
    Sweep("bfloat16", 128, None, "causal window sink_tokens sinks", varlen=True, top_left=True),
    Sweep("float16", 256, None, "causal", varlen=True),
    Sweep("bfloat16", 80, 72, "window"),
    Sweep("float16", 128, None, ""),
    Sweep("bfloat16", 64, None, "causal sinks", varlen=True),
    Sweep("float16", 40, None, "window softcap scale", top_left=True),
    Sweep("float16", 96, None, "causal alibi"),
    Sweep("bfloat16", 192, None, "causal"),
    Sweep("float16", 192, 128, "softcap", varlen=True),
    Sweep("float16", 192, None, "causal alibi sinks", varlen=True, top_left=True),
    Sweep("bfloat16", 256, None, ""),
    Sweep("float16", 256, 72, "window sink_tokens sinks alibi softcap", varlen=True),
    Sweep("bfloat16", 32, 200, "causal window alibi"),
    Sweep("float16", 64, None, "causal dropout bias"),
    Sweep("bfloat16", 128, None, "dropout alibi", varlen=True),
    Sweep("bfloat16", 96, None, "bias softcap window"),
    Sweep("float16", 192, None, "bias alibi dropout causal"),
    Sweep("bfloat16", 256, None, "dropout window sinks scale", top_left=True),
    Sweep("float16", 256, None, "bias sink_tokens window softcap sinks"),
    Sweep("float16", 40, None, "bias"),
    Sweep("bfloat16", 8, 24, "causal"),
)
_VARIANTS = {str(sweep): (number, sweep) for number, sweep in enumerate(SWEEPS)}
_SHAPES = ((1, 1), (33, 95), (70, 31), (113, 203), (130, 7), (200, 600))
_MODIFIED_SHAPES = ((1, 1), (70, 31), (113, 203), (300, 520))
# The T5 bias is the kernel's own bias, not a modification.
_TILES = {
    f"{name} {dim}": (name, dim)
    for name in MODIFICATIONS
    if name != "t5 relative bias"
    for dim in (64, 96, 128, 192, 256)
}
_IN_EVERY_MODE = ("document mask in every mode", "tanh gating in every mode")
GRID = (*_VARIANTS, *_TILES, *_IN_EVERY_MODE)
USUAL = (str(SWEEPS[2]),)


def run_variant(variant: str, *, thorough: bool) -> None:
    """Raise AssertionError or EmulationFault if a shape shows a difference."""
    if variant in _IN_EVERY_MODE:
        for number in range(len(MODES)):
            _check_modified(
                variant.removesuffix(" in every mode"), "bfloat16", 128, (300, 520), number % 2 == 1, number
            )
    elif variant in _TILES:
        name, dim = _TILES[variant]
        for number, shape in enumerate(_MODIFIED_SHAPES):
            for causal in (False, True):
                _check_modified(name, "bfloat16" if dim % 128 else "float16", dim, shape, causal, number + dim)
    else:
        number, sweep = _VARIANTS[variant]
        for index, seqlens in enumerate(_SHAPES + (SEQLENS if thorough else ())):
            # Keys and values that no row of their sequence sees hold NaN.
            case = poison_unseen(case_of(sweep, number, index, seqlens))
            for n in range(3 if thorough else 1):
                # From one block for everything to a block for each tile.
                blocks = (1, 3, None)[(index + n) % 3]
                launch = launch_of(5 * index + number + 7 * n)
                check_case(case, kernel=_KERNEL, multiprocessors=blocks, seed=index + n, **launch)


def _check_modified(name: str, dtype: str, dim: int, shape: tuple[int, int], causal: bool, number: int) -> None:
    case = modified_case(name, dtype, number, dim, *shape, causal)
    blocks = (1, 3, None)[number % 3]
    check_modified(case, causal=causal, kernel=_KERNEL, multiprocessors=blocks, seed=number, **launch_of(5 * number))
