"""Hard problems of forward_wide."""

from __future__ import annotations

from typing import Any

import numpy as np
from cases.forward_edges import edge_case
from cases.large_scores import check_large
from cases.poison import poison_unseen
from cases.positions import PLACED, placed_case
from cases.steady_scores import check_steady
from emulated.far_tensors import check_far
from emulated.forward import check_case
from emulated.sweeps import Sweep, case_of, launch_of
from inside.testing import SEQLENS

from gpu_actors.testing import ForwardCase, random_forward
from matrix.forward import LAUNCHES

_KERNEL = "forward_wide"

# Several tiles of keys, and rows and keys that end inside a tile. On sm_86 there is one stage of tiles of 16 keys at
# head dim 512, on sm_90a there are two of 32 at 320.
_SHAPE: dict[str, Any] = {"dtype": "float16", "head_dim": 512, "seqlens": (40, 75), "varlen": False, "heads": (2, 1)}
_OPTIONS = ("dropout", "sinks", "bias", "alibi", "softcap")
_PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": {"kind": "rising"},
    "stages": {"kind": "gaussian", "head_dim": 320, "seqlens": (20, 150), "arch": "sm_90a"},
    "odd": {"dtype": "bfloat16", "head_dim": 264, "head_dim_v": 280, "kind": "gaussian"},
    "causal": {"dtype": "bfloat16", "always": ("causal",)},
    "nonfinite": {"seqlens": (60, 60), "always": ("causal",)},
    "options": {"head_dim": 320, "always": _OPTIONS},
    "nonfinite, dropped": {"head_dim": 320, "seqlens": (40, 40), "always": _OPTIONS},
    "one key": {"dtype": "bfloat16", "seqlens": (33, 1), "always": ("causal",)},
    "varlen": {
        "dtype": "bfloat16",
        "head_dim": 40,
        "seqlens": (90, 75),
        "varlen": True,
        "batch": 3,
        "always": ("causal",),
    },
}
_EDGES = ("empty sequences", "empty sequences with sinks")
KERNELS = (_KERNEL,)
ROWS = (*_PROBLEMS, *_EDGES, *PLACED, "low", "far", "steady")
RARE = frozenset({"nonfinite, dropped", "empty sequences with sinks", *PLACED[1:], "low", "steady"})


def _case_of(row: str) -> ForwardCase:
    if row in _EDGES:
        return edge_case(row, "bfloat16", 40)
    if row in PLACED:
        return placed_case(row, "float16", 40, 70, 90)
    chosen = {name: value for name, value in {**_SHAPE, **_PROBLEMS[row]}.items() if name != "arch"}
    case = poison_unseen(random_forward(len(row), **{"features": (), **chosen}))
    if "nonfinite" in row:
        case.v[0, 33, :, 3::50] = np.inf if "dropped" in row else np.nan
    return case


def run(row: str) -> None:
    """Raise AssertionError or EmulationFault if the row shows a difference."""
    if row == "far":
        for axis in range(3):
            check_far(_KERNEL, axis)
        return
    if row == "steady":
        check_steady(_KERNEL)
        return
    if row == "low":
        check_large(row, _KERNEL, "bfloat16", 320, "sm_80")
        return
    case = _case_of(row)
    arch = _PROBLEMS.get(row, {}).get("arch", "sm_86")
    for delivery, schedule, seed in LAUNCHES:
        check_case(case, kernel=_KERNEL, arch=arch, delivery=delivery, schedule=schedule, seed=seed, limit_seconds=30.0)


# Every row of the tile table, every spread of head dims over chunks, unequal halves, every option.
_SWEEPS = (
    Sweep("bfloat16", 512, None, "causal", arch="sm_80"),
    Sweep("float16", 264, 512, "window sinks bias", arch="sm_86", varlen=True),
    Sweep("bfloat16", 512, 256, "causal softcap alibi", arch="sm_86"),
    Sweep("float16", 320, None, "", arch="sm_90a"),
    Sweep("bfloat16", 512, None, "", arch="sm_86"),
    Sweep("bfloat16", 288, 272, "window sink_tokens dropout", arch="sm_80", top_left=True),
    Sweep("float16", 448, None, "causal sinks", arch="sm_86", varlen=True),
    Sweep("bfloat16", 376, 504, "causal window sink_tokens alibi", arch="sm_90a", varlen=True, top_left=True),
    Sweep("float16", 128, 392, "causal dropout bias softcap", arch="sm_80"),
    Sweep("bfloat16", 512, 8, "window alibi scale", arch="sm_90a"),
    Sweep("float16", 8, 512, "causal window sinks dropout", arch="sm_80", varlen=True),
    Sweep("bfloat16", 512, None, "window dropout sinks alibi softcap bias", arch="sm_80", varlen=True),
)
_VARIANTS = {str(sweep): (number, sweep) for number, sweep in enumerate(_SWEEPS)}
_SHAPES = ((1, 1), (33, 95), (70, 31))
_DIMS = tuple(f"head dim {dim}" for dim in range(264, 513, 8))
GRID = (*_VARIANTS, *_DIMS)
USUAL = (str(_SWEEPS[1]),)


def run_variant(variant: str, *, thorough: bool) -> None:
    """Raise AssertionError or EmulationFault if a shape shows a difference."""
    if variant in _DIMS:
        _check_dim(int(variant.split()[-1]))
        return
    number, sweep = _VARIANTS[variant]
    larger = tuple(shape for shape in SEQLENS if shape[0] * shape[1] <= 300 * 300)
    for index, seqlens in enumerate((larger if thorough else ()) + _SHAPES):
        # Keys and values that no row of their sequence sees hold NaN.
        case = poison_unseen(case_of(sweep, 70 + number, index, seqlens))
        launch = launch_of(5 * index + number)
        check_case(case, kernel=_KERNEL, arch=sweep.arch, seed=index, limit_seconds=600.0, **launch)


def _check_dim(dim: int) -> None:
    for number, arch in enumerate(("sm_80", "sm_86", "sm_90a")):
        mask = ("", "causal", "window")[number]
        sweep = Sweep(("float16", "bfloat16")[number % 2], dim, 512 + 264 - dim, mask, arch=arch)
        case = poison_unseen(case_of(sweep, dim, number, ((40, 70), (17, 130), (65, 50))[number]))
        check_case(case, kernel=_KERNEL, arch=arch, seed=number, **launch_of(dim // 8 + number))
