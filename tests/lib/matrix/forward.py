"""Hard problems of forward_mma, and of forward_simple."""

from __future__ import annotations

from typing import Any

import numpy as np
from cases.finite_masks import hide_first
from cases.forward_edges import EDGES, edge_case
from cases.large_scores import LARGE, check_large
from cases.poison import poison_unseen
from cases.positions import PLACED, placed_case
from cases.steady_scores import check_steady
from emulated.contraction import like_hardware
from emulated.far_tensors import check_far
from emulated.forward import check_case, run_case
from emulated.sweeps import LAUNCHES as MODES
from emulated.sweeps import Sweep, assert_same_bits, case_of, launch_of
from inside.testing import SEQLENS

from gpu_actors.testing import ForwardCase, check_output, random_forward

LAUNCHES = (("late", "greedy", 0), ("eager", "greedy", 1), ("late", "lane", 1), ("random", "random", 2))

# Most have more key tiles than the ring has stages, and rows and keys that end inside a tile.
_SHAPE: dict[str, Any] = {"heads": (2, 1), "features": ()}
_PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": {"dtype": "float16", "head_dim": 32, "seqlens": (150, 300), "varlen": False, "kind": "rising"},
    "batch": {
        "dtype": "float16",
        "head_dim": 32,
        "seqlens": (150, 300),
        "varlen": False,
        "batch": 2,
        "kind": "gaussian",
    },
    "causal": {"dtype": "bfloat16", "head_dim": 32, "seqlens": (137, 300), "varlen": False, "always": ("causal",)},
    "few": {"dtype": "float16", "head_dim": 32, "seqlens": (70, 21), "varlen": False, "always": ("causal",)},
    "varlen": {
        "dtype": "float16",
        "head_dim": 40,
        "seqlens": (150, 210),
        "varlen": True,
        "batch": 3,
        "always": ("causal",),
    },
    "window": {
        "dtype": "float16",
        "head_dim": 32,
        "seqlens": (210, 333),
        "varlen": False,
        "always": ("window", "sink_tokens"),
        "alignment": "top_left",
    },
    "options": {
        "dtype": "float16",
        "head_dim": 32,
        "seqlens": (70, 150),
        "varlen": False,
        "batch": 2,
        "always": ("dropout", "sinks", "bias", "alibi", "softcap"),
    },
    "gqa": {"dtype": "float16", "head_dim": 32, "seqlens": (70, 150), "varlen": False, "heads": (4, 2)},
    "sinks": {
        "dtype": "float16",
        "head_dim": 32,
        "seqlens": (70, 21),
        "varlen": False,
        "kind": "gaussian",
        "always": ("sinks",),
    },
    "nonfinite": {"dtype": "float16", "head_dim": 32, "seqlens": (150, 150), "varlen": False, "always": ("causal",)},
    "hidden": {"dtype": "float16", "head_dim": 32, "seqlens": (70, 150), "varlen": False, "always": ("bias",)},
    "padded": {"dtype": "bfloat16", "head_dim": 40, "head_dim_v": 72, "seqlens": (70, 150), "varlen": False},
    "wide": {"dtype": "float16", "head_dim": 96, "seqlens": (40, 300), "varlen": False, "kind": "gaussian"},
    "float": {"dtype": "float32", "head_dim": 40, "seqlens": (70, 150), "varlen": False, "always": ("causal",)},
    "nonfinite, dropped": {
        "dtype": "float16",
        "head_dim": 32,
        "seqlens": (70, 150),
        "varlen": False,
        "always": ("dropout", "sinks", "bias", "alibi", "softcap"),
    },
    "one key": {"dtype": "float16", "head_dim": 32, "seqlens": (150, 1), "varlen": False, "always": ("causal",)},
    "keyless": {"dtype": "float16", "head_dim": 32, "seqlens": (600, 5), "varlen": False, "always": ("causal",)},
    "ties": {"dtype": "float32", "head_dim": 40, "seqlens": (70, 31), "varlen": False, "kind": "rising"},
}
KERNELS = ("forward_mma", "forward_simple")
_SIMPLE = ("plain", "causal", "few", "wide", "ties", *EDGES, *PLACED, "low", "low with sinks", "far", "steady")
_MMA = (
    *_PROBLEMS,
    "causal, like hardware",
    *EDGES,
    *PLACED,
    *LARGE,
    "low in tf32",
    "far",
    "steady",
    "steady, partly fused",
)
ROWS = (*_MMA, *(f"simple {row}" for row in _SIMPLE))
_RARE_CHUNKS = ("chunks", "chunks from the top left")
RARE = frozenset(
    {
        *_RARE_CHUNKS,
        "ties",
        "low with sinks",
        "low in tf32",
        "steady, partly fused",
        *(f"simple {row}" for row in (*_RARE_CHUNKS, "chunks of positions", "steps in a window", "apart in a window")),
    }
)


def _case_of(name: str) -> ForwardCase:
    if name in EDGES:
        return edge_case(name, "float16", 40 if name == "empty sequences" else 32)
    if name in PLACED:
        return placed_case(name, "bfloat16", 32, 70, 90)
    case = poison_unseen(random_forward(len(name), **{**_SHAPE, **_PROBLEMS[name]}))
    if "nonfinite" in name:
        case.v[0, 100, :, 3] = np.inf if "dropped" in name else np.nan
    if name == "hidden":
        case.options["bias"] = hide_first(case.options["bias"])
    return case


def run(row: str) -> None:
    """Raise AssertionError or EmulationFault if the row shows a difference."""
    if row == "causal, like hardware":
        with like_hardware():
            run("causal")
        return
    name = row.removeprefix("simple ")
    kernel = "forward_mma" if name == row else "forward_simple"
    if name == "far":
        for axis in range(3):
            check_far(kernel, axis)
        return
    if "steady" in name:
        check_steady(kernel, arch="sm_86", fused="random" if "partly" in name else True)
        return
    if name in LARGE:
        check_large(name, kernel, *(("float16", 64) if name == row else ("float32", 20)), "sm_86")
        return
    if name == "low in tf32":
        check_large("low", kernel, "float32", 64, "sm_86", "tf32")
        return
    case = _case_of(name)
    for delivery, schedule, seed in LAUNCHES:
        check_case(
            case,
            compute="tf32" if case.q.dtype == np.float32 else None,
            kernel=kernel,
            arch="sm_86",
            delivery=delivery,
            schedule=schedule,
            seed=seed,
            limit_seconds=60.0,
        )


# Every option alone or combined, every row of the tile table, both layouts, both alignments.
_MMA_SWEEPS = (
    Sweep("float16", 64, None, "", arch="sm_80"),
    Sweep("float16", 64, 96, "causal alibi sinks", arch="sm_86", varlen=True),
    Sweep("bfloat16", 128, None, "causal window sink_tokens", arch="sm_90a", varlen=True, top_left=True),
    Sweep("bfloat16", 40, None, "causal dropout", arch="sm_80"),
    Sweep("float16", 80, None, "window sink_tokens bias scale", arch="sm_86"),
    Sweep("bfloat16", 32, 200, "window dropout sinks alibi softcap", arch="sm_80", varlen=True, top_left=True),
    Sweep("float16", 256, 72, "causal sinks", arch="sm_86"),
    Sweep("float32", 40, 72, "window sink_tokens softcap", compute="tf32", arch="sm_80", varlen=True),
    Sweep("float32", 96, None, "causal bias dropout sinks", compute="bf16", arch="sm_86", top_left=True),
    Sweep("float32", 256, None, "causal", compute="f16", arch="sm_86", varlen=True),
    Sweep("bfloat16", 8, None, "causal", arch="sm_80"),
    Sweep("float16", 24, 8, "window sinks bias", arch="sm_86", varlen=True),
    Sweep("float32", 16, 24, "causal dropout", compute="tf32", arch="sm_80"),
)
_SIMPLE_SWEEPS = (
    Sweep("float32", 64, None, ""),
    Sweep("bfloat16", 40, None, "causal dropout"),
    Sweep("float16", 64, 24, "causal alibi sinks", varlen=True),
    Sweep("float32", 5, 65, "window sink_tokens softcap", varlen=True),
    Sweep("float16", 80, None, "causal window sink_tokens bias scale"),
    Sweep("float64", 96, None, "window bias dropout sinks softcap alibi", top_left=True),
    Sweep("float64", 160, 136, "causal window sink_tokens", varlen=True, top_left=True),
    Sweep("bfloat16", 128, None, "window dropout sinks alibi", varlen=True, top_left=True),
    Sweep("bfloat16", 256, None, "causal softcap bias"),
    Sweep("float8_e4m3fn", 64, None, "causal descales sinks", varlen=True),
    Sweep("float8_e5m2", 48, 17, "window descales bias alibi", top_left=True),
    Sweep("bfloat16", 512, None, "causal", arch="sm_80"),
    Sweep("float32", 264, 512, "window sinks bias", arch="sm_86", varlen=True),
    Sweep("float64", 512, 300, "causal softcap", arch="sm_80"),
    Sweep("float32", 64, None, "causal", compute="f16"),
    Sweep("float32", 64, None, "causal", compute="bf16"),
)
_VARIANTS = {
    f"{prefix}{sweep}": (number, sweep, kernel)
    for kernel, prefix, sweeps in (
        ("forward_mma", "", _MMA_SWEEPS),
        ("forward_simple", "simple ", _SIMPLE_SWEEPS),
    )
    for number, sweep in enumerate(sweeps)
}
_SHAPES = ((1, 1), (33, 95), (70, 31), (113, 203), (31, 300), (130, 7), (200, 260))
_HEADS = ((1, 1), (2, 1), (2, 2), (3, 1), (4, 2))
_DRAWN = 100
_RANDOM = tuple(f"random {number}" for number in range(100, 200, 10))
GRID = (*_VARIANTS, *_RANDOM)
_USUAL_MMA, _USUAL_SIMPLE = (2, 5, 6, 8), (1, 3, 5, 8, 9, 10)
USUAL = tuple(
    name
    for name, (number, _, kernel) in _VARIANTS.items()
    if number in (_USUAL_MMA if kernel == "forward_mma" else _USUAL_SIMPLE)
)


def run_variant(variant: str, *, thorough: bool) -> None:
    """Raise AssertionError or EmulationFault if a shape shows a difference."""
    if variant in _RANDOM:
        first = int(variant.split()[-1])
        for seed in range(first, first + 10):
            case, arch = poison_unseen(random_forward(seed)), ("sm_80", "sm_86", "sm_90a")[seed % 3]
            compute = "tf32" if case.q.dtype == np.float32 else None
            check_case(case, compute=compute, kernel="forward_mma", arch=arch, limit_seconds=600.0)
        return
    number, sweep, kernel = _VARIANTS[variant]
    given: dict[str, Any] = {"compute": sweep.compute, "kernel": kernel, "arch": sweep.arch}
    for index, seqlens in enumerate(SEQLENS if thorough else _SHAPES):
        # Keys and values that no row of their sequence sees hold NaN.
        case = poison_unseen(case_of(sweep, number, index, seqlens))
        check_case(case, seed=index, **given, **launch_of(5 * index + number))
    for seed in range(1000 * number, 1000 * number + _DRAWN if thorough else 0):
        _check_drawn(sweep, seed, given)


def _check_drawn(sweep: Sweep, seed: int, given: dict[str, Any]) -> None:
    """Up to a few tiles each way. Modes give the same bits: all modes for every tenth seed, else two."""
    rng = np.random.default_rng(seed)
    case = random_forward(
        seed,
        features=(),
        seqlens=(int(rng.integers(1, 100)), int(rng.integers(1, 260))),
        batch=int(rng.integers(1, 4)),
        heads=_HEADS[rng.integers(len(_HEADS))],
        dtype=sweep.dtype,
        head_dim=sweep.head_dim,
        head_dim_v=sweep.head_dim_v,
        varlen=sweep.varlen,
        alignment=sweep.alignment,
        always=sweep.options,
    )
    poisoned = poison_unseen(case)
    modes = MODES if seed % 10 == 0 else (MODES[seed % 12], MODES[(5 * seed + 7) % 12])
    results = [
        run_case(poisoned, delivery=delivery, schedule=schedule, seed=seed, arithmetic="nearest", **given)
        for delivery, schedule in modes
    ]
    assert_same_bits(results)
    check_output(*results[0], *case.inputs, repro=case.repro, compute=sweep.compute, **case.options)
