"""Hard problems of backward_mma and of backward_simple, with the kernels before and after them."""

from __future__ import annotations

from typing import Any

import numpy as np
from cases.finite_masks import hide_first
from cases.poison import poison_unseen_backward
from emulated.backward import check_case, run_case
from emulated.far_gradients import check_far_gradients, check_far_scratch
from emulated.gradients import (
    answered,
    case_of,
    check_empty_sequences,
    check_float16_range,
    check_lse_gradient,
)
from emulated.sweeps import LAUNCHES as MODES
from emulated.sweeps import Sweep, launch_of
from inside.testing import SEQLENS

from gpu_actors.testing import BackwardCase, check_gradients, random_backward

LAUNCHES = (("late", "greedy", 0), ("eager", "greedy", 1), ("late", "lane", 1), ("random", "random", 2))

# Most have more tiles of queries than the ring has stages, and rows and keys that end inside a tile.
_SHAPE: dict[str, Any] = {
    "dtype": "float16",
    "head_dim": 32,
    "varlen": False,
    "kind": "gaussian",
    "batch": 1,
    "heads": (2, 1),
    "features": (),
}
_FLOATS: dict[str, Any] = {"dtype": "float32", "head_dim": 64}
_PLAIN: dict[str, Any] = {"dtype": "float32", "head_dim": 20}
_ALL = ("dropout", "sinks", "bias", "alibi", "softcap")
_PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": {"seqlens": (210, 150)},
    "late": {"seqlens": (70, 150)},
    "pairs": {"dtype": "bfloat16", "head_dim": 128, "seqlens": (150, 200)},  # of 16 keys and 16 rows of dQ a warp
    "large": {"seqlens": (70, 150)},
    "opposite": {"seqlens": (70, 2)},
    "batch": {"seqlens": (150, 200), "batch": 2},
    "ends": {"seqlens": (128, 256)},  # of tiles
    "one key": {"seqlens": (70, 1)},
    "causal": {"seqlens": (290, 290), "always": ("causal",)},
    "edge": {"seqlens": (150, 212), "always": ("causal",)},  # tiles with one hidden pair
    "few": {"seqlens": (150, 21), "always": ("causal",)},
    "varlen": {"seqlens": (150, 210), "varlen": True, "batch": 3, "always": ("causal",)},
    "window": {"seqlens": (333, 410), "always": ("window", "sink_tokens"), "alignment": "top_left"},
    "options": {"seqlens": (70, 150), "batch": 2, "kind": "peaked", "always": _ALL},
    "sinks": {"seqlens": (250, 21), "batch": 12, "heads": (1, 1), "always": ("sinks",)},
    "gqa": {"seqlens": (70, 150), "heads": (4, 2)},
    "padded": {"dtype": "bfloat16", "head_dim": 40, "head_dim_v": 72, "seqlens": (70, 150)},
    "wide": {"dtype": "bfloat16", "head_dim": 256, "seqlens": (100, 100), "always": ("causal",)},
    "wide dq": {"dtype": "bfloat16", "head_dim": 256, "seqlens": (40, 60), "always": ("softcap",)},
    "passes": {"dtype": "bfloat16", "head_dim": 128, "seqlens": (70, 100), "always": ("dropout",)},
    "float": {"dtype": "float32", "head_dim": 96, "seqlens": (70, 150), "always": ("causal",)},
    "redundant": {"dtype": "float32", "head_dim": 256, "seqlens": (40, 40), "always": ("bias",)},
    "nonfinite": {"seqlens": (150, 150), "always": ("causal",)},
    "nonfinite bias": {"seqlens": (150, 150), "always": ("causal", "bias")},
    "hidden": {"seqlens": (150, 150), "always": ("bias",)},
    "nonfinite key": {"seqlens": (150, 150), "always": ("causal",)},
    # Floats, whose gradients show the last bits of their sums.
    "turns short": {**_FLOATS, "seqlens": (40, 150), "always": ("bias",)},
    "turns": {**_FLOATS, "seqlens": (90, 610)},
    "turns window": {**_FLOATS, "seqlens": (350, 350), "always": ("window",), "alignment": "top_left"},
    "turns bias": {**_FLOATS, "seqlens": (40, 150), "batch": 3, "always": ("bias",)},
    # Of backward_simple.
    "simple": {**_PLAIN, "seqlens": (70, 90)},
    "simple one key": {**_PLAIN, "seqlens": (70, 1)},
    "simple causal": {**_PLAIN, "seqlens": (70, 90), "always": ("causal",)},
    "simple varlen": {**_PLAIN, "seqlens": (70, 90), "varlen": True, "batch": 3, "always": ("causal",)},
    "simple window": {**_PLAIN, "seqlens": (133, 150), "always": ("window", "sink_tokens"), "alignment": "top_left"},
    "simple options": {**_PLAIN, "seqlens": (40, 50), "batch": 2, "kind": "peaked", "always": _ALL},
    "simple gqa": {**_PLAIN, "seqlens": (40, 50), "heads": (4, 2)},
    "simple few": {**_PLAIN, "seqlens": (90, 20), "always": ("causal",)},
    "simple double": {**_PLAIN, "dtype": "float64", "seqlens": (40, 50), "always": ("softcap",)},
    "simple nonfinite": {**_PLAIN, "seqlens": (70, 70), "always": ("causal",)},
}
_ARCHS = {"late": "sm_90a", "pairs": "sm_80"}
# For float16 with a head dim of 64, whose kernels other tests compile as well.
_USUAL = {"arch": "sm_80"}
_SIMPLE = {"arch": "sm_80", "kernel": "backward_simple"}
_CHECKS: dict[str, Any] = {
    "empty": lambda: check_empty_sequences(_USUAL),
    "lse gradient": lambda: check_lse_gradient(_USUAL),
    "small": lambda: check_float16_range(_USUAL, 1e-4, 1.0, causal=True),  # dS is 10^-6, with few bits in float16
    "far": lambda: [check_far_gradients(axis) for axis in range(3)],
    "far scratch": lambda: check_far_scratch("backward_mma", "sm_80"),
    "simple empty": lambda: check_empty_sequences(_SIMPLE),
    "simple lse gradient": lambda: check_lse_gradient(_SIMPLE),
    "simple large": lambda: check_float16_range(_SIMPLE, 3000.0, 20.0, causal=True),
}
KERNELS = ("backward_prepare", "backward_mma", "backward_finish", "backward_simple")
ROWS = (*_PROBLEMS, *_CHECKS)
# Other rows cover their options and paths, and test_backward.py repeats deterministic launches.
RARE = {
    *("turns", "turns window", "sinks", "batch", "float", "redundant", "hidden", "nonfinite bias"),
    *("far scratch", "simple empty", "simple varlen", "simple window"),
}


def run(row: str) -> None:
    """Raise AssertionError or EmulationFault if the row shows a difference."""
    if row in _CHECKS:
        _CHECKS[row]()
        return
    case = _problem(row)
    compute = _compute_of(row)
    poisoned = poison_unseen_backward(case)
    deterministic, first = row.startswith("turns"), None
    # More blocks at a time than cores, so that the system's clock mixes them.
    mixed: dict[str, Any] = {"threads": 8} if row == "turns bias" else {}
    if deterministic:
        mixed["arithmetic"] = "nearest"  # the errors of emulated hardware depend on a launch's seed
    for delivery, schedule, seed in LAUNCHES * (3 if deterministic and row != "turns short" else 1):
        gradients = run_case(
            poisoned,
            compute=compute,
            deterministic=deterministic,
            arch=_ARCHS.get(row, "sm_86"),
            kernel="backward_simple" if row.startswith("simple") else "backward_mma",
            delivery=delivery,
            schedule=schedule,
            seed=seed,
            limit_seconds=40.0,
            **mixed,
        )
        given = {"out": case.out, "lse": case.lse, "compute": compute}
        check_gradients(gradients, *case.arguments, repro=case.repro, **given, **case.options)
        first = first or gradients
        if deterministic:
            assert_repeats(gradients, first)


def assert_repeats(gradients: Any, first: Any) -> None:
    """dQ, and dbias where there is one, have the bits of the first launch."""
    np.testing.assert_array_equal(gradients.dq, first.dq, err_msg="dq does not repeat")
    if gradients.dbias is not None:
        np.testing.assert_array_equal(gradients.dbias, first.dbias, err_msg="dbias does not repeat")


def _compute_of(row: str) -> str | None:
    floats = _PROBLEMS[row].get("dtype") == "float32" and not row.startswith("simple")
    return "tf32" if floats else None


def _problem(row: str) -> BackwardCase:
    case = random_backward(len(row), compute=_compute_of(row), **{**_SHAPE, **_PROBLEMS[row]})
    if row in ("turns short", "turns bias"):  # shared by every sequence and head
        case.options["bias"] = np.ascontiguousarray(case.options["bias"][:1, :1])
    if row == "options":  # of the type that backward_finish turns sums into
        case.options["bias"] = case.options["bias"].astype(np.float16)
    if row == "hidden":
        case = answered(case, {**case.options, "bias": hide_first(case.options["bias"])})
    if row in ("large", "opposite"):
        case = beyond_float16(case, row)
    if row == "gqa":
        case = of_unlike_heads(case)
    if row in ("nonfinite", "nonfinite bias"):
        case.dout[0, 100, :, 3] = np.nan
    if row == "simple nonfinite":
        case.dout[0, 40, :, 3] = np.nan
    if row == "nonfinite key":
        case.forward.k[0, 100, :, 3] = np.nan
        case.lse[0, :, 100:], case.out[0, 100:] = np.nan, np.nan
    return case


def beyond_float16(case: BackwardCase, row: str) -> BackwardCase:
    """The case with a dS that overflows float16."""
    case.forward.q[...] *= np.float16(0.01)
    if row == "large":
        case.dout[...] *= 3000
    else:  # V of the two keys is opposite, so their dP is too, and delta is 0
        case.dout[...] *= 1000
        case.forward.v[:, 1] = -case.forward.v[:, 0]
        case.forward.k[...] *= np.float16(0.1)
    case.forward.v[...] *= 20
    return answered(case, case.options)


def of_unlike_heads(case: BackwardCase) -> BackwardCase:
    """The case with values 2^8 times as large in every second KV head, and in the next sequence in the other heads.
    This changes dS's power of two."""
    batch, _, heads, _ = case.forward.v.shape
    large = np.add.outer(np.arange(batch), np.arange(heads)) % 2 == 1
    case.forward.v[...] *= np.where(large, 256, 1).astype(np.float16)[:, None, :, None]
    return answered(case, case.options)


# Every option alone or combined, every row of the tile table, both layouts, both alignments, both ways to reduce.
SWEEPS = (
    Sweep("float16", 64, None, "causal", arch="sm_80"),
    Sweep(
        "bfloat16",
        128,
        None,
        "causal window sink_tokens",
        arch="sm_90a",
        varlen=True,
        top_left=True,
        deterministic=True,
    ),
    Sweep("float16", 40, None, "dropout sinks bias alibi softcap", arch="sm_86"),
    Sweep("bfloat16", 256, 72, "causal sinks", arch="sm_86"),
    Sweep("float32", 96, None, "window", compute="tf32", arch="sm_80", varlen=True, deterministic=True),
    Sweep("float16", 64, 96, "causal alibi sinks", arch="sm_86", varlen=True, top_left=True),
    Sweep("bfloat16", 40, None, "causal dropout", arch="sm_80", deterministic=True),
    Sweep("float16", 80, None, "window sink_tokens bias scale", arch="sm_90a", deterministic=True),
    Sweep("bfloat16", 32, 200, "window dropout sinks alibi softcap", arch="sm_80", varlen=True, top_left=True),
    Sweep("bfloat16", 128, None, "bias scale", arch="sm_86"),
    Sweep("bfloat16", 128, 104, "dropout", arch="sm_80", varlen=True),
    Sweep("float16", 192, None, "causal", arch="sm_86", varlen=True),
    Sweep("bfloat16", 256, None, "causal softcap", arch="sm_90a", deterministic=True),
    Sweep("bfloat16", 192, 128, "", arch="sm_80", varlen=True),
    Sweep("bfloat16", 256, None, "causal softcap", arch="sm_86", varlen=True),
    Sweep(
        "float32", 40, 72, "causal bias dropout sinks", compute="bf16", arch="sm_86", top_left=True, deterministic=True
    ),
    Sweep("float32", 64, None, "window sink_tokens softcap", compute="tf32", arch="sm_90a", varlen=True),
    Sweep("float32", 128, None, "causal bias", compute="f16", arch="sm_86"),
    Sweep("float32", 256, None, "causal", compute="tf32", arch="sm_86", varlen=True),
    Sweep("float32", 256, 200, "dropout alibi", compute="tf32", arch="sm_80"),
    Sweep("float32", 224, None, "window bias", compute="bf16", arch="sm_90a", deterministic=True),
)
# The same for backward_simple, in every dtype.
SIMPLE_SWEEPS = (
    Sweep("float32", 20, None, "causal sinks bias dropout softcap alibi", arch="sm_80"),
    Sweep("float64", 64, 33, "window sink_tokens sinks", arch="sm_80", varlen=True, top_left=True, usual=True),
    Sweep("float64", 136, None, "causal bias", arch="sm_86"),
    Sweep("float64", 256, None, "", arch="sm_86"),
    Sweep("float64", 5, 65, "causal window sink_tokens softcap dropout", arch="sm_90a", varlen=True),
    Sweep("float32", 128, None, "window alibi dropout sinks", arch="sm_80", varlen=True, top_left=True),
    Sweep("float32", 160, None, "causal window sink_tokens bias scale", arch="sm_86"),
    Sweep("float32", 256, 3, "causal sinks alibi", arch="sm_90a"),
    Sweep("float32", 64, None, "causal", compute="tf32", arch="sm_80"),
    Sweep("bfloat16", 17, None, "causal dropout bias", arch="sm_80"),
    Sweep("float16", 100, 36, "window softcap sinks", arch="sm_86", varlen=True),
)
_SHAPES = ((1, 1), (33, 95), (70, 31), (113, 203), (31, 300), (130, 7), (200, 260))
_SIMPLE_SHAPES = ((1, 1), (33, 95), (70, 31), (113, 203), (31, 300), (130, 7))
_VARIANTS = {str(sweep): ("backward_mma", number, sweep) for number, sweep in enumerate(SWEEPS)} | {
    f"simple-{sweep}": ("backward_simple", number, sweep) for number, sweep in enumerate(SIMPLE_SWEEPS)
}
GRID = tuple(_VARIANTS)
USUAL = frozenset(name for name, (_, _, sweep) in _VARIANTS.items() if sweep.usual)
_RANDOM = 50  # problems of a variant
_HEADS = ((1, 1), (2, 1), (2, 2), (3, 1), (4, 2))


def run_variant(variant: str, *, thorough: bool) -> None:
    """Raise AssertionError or EmulationFault if a shape shows a difference."""
    kernel, number, sweep = _VARIANTS[variant]
    simple = kernel == "backward_simple"
    launch = {"compute": sweep.compute, "deterministic": sweep.deterministic, "arch": sweep.arch, "kernel": kernel}
    shapes = (_SIMPLE_SHAPES if thorough else _SIMPLE_SHAPES[:3]) if simple else _SHAPES
    base = 3000 + 100 * number if simple else 1000 * number
    for index, seqlens in enumerate((*shapes, *SEQLENS) if thorough and not simple else shapes):
        large = max(seqlens) > 300  # slow in the emulation
        heads = (2, 1) if large else ((6, 2), (3, 1), (2, 2))[index % 3]
        case = case_of(sweep, base + index, seqlens, batch=1 if large else 1 + index % 3, heads=heads)
        check_case(case, seed=index, limit_seconds=600.0, **launch, **launch_of(5 * index + number))
    if simple:
        return
    for seed in range(base, base + _RANDOM) if thorough else (base,):
        modes = (seed % 12, (5 * seed + 7) % 12) if not thorough else range(12) if seed % 10 == 0 else (seed % 12,)
        _check_random(sweep, seed, launch, tuple(MODES[mode] for mode in modes))


def _check_random(sweep: Sweep, seed: int, launch: dict[str, Any], modes: tuple[tuple[str, str], ...]) -> None:
    """Right in every mode. dK and dV have the same bits in all modes, and if deterministic all gradients."""
    # Up to a few tiles each way, because kernels err at edges; larger shapes are in the lists.
    rng = np.random.default_rng(seed)
    seqlens = int(rng.integers(1, 200)), int(rng.integers(1, 260))
    case = case_of(sweep, seed, seqlens, batch=int(rng.integers(1, 4)), heads=_HEADS[rng.integers(len(_HEADS))])
    poisoned, given = poison_unseen_backward(case), {"out": case.out, "lse": case.lse, "compute": sweep.compute}
    first: Any = None
    for delivery, schedule in modes:
        found = run_case(poisoned, seed=seed, delivery=delivery, schedule=schedule, **launch)
        first = first or found
        for name in ("dk", "dv", *(("dq", "dbias", "dsinks") if sweep.deterministic else ())):
            np.testing.assert_array_equal(getattr(found, name), getattr(first, name), err_msg=case.repro)
        if not sweep.deterministic or found is first:
            check_gradients(found, *case.arguments, repro=case.repro, **given, **case.options)
