"""Hard problems of backward_sm90, with the kernels before and after it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from cases.finite_masks import hide_first
from cases.poison import poison_unseen_backward
from emulated.backward import backward_problem_of, check_case, run_case
from emulated.backward import run as gradients_of
from emulated.far_gradients import check_far_scratch
from emulated.forward import OPERANDS
from emulated.gradients import (
    answered,
    case_of,
    check,
    check_empty_sequences,
    check_float16_range,
    check_lse_gradient,
    operands_of,
)
from emulated.sweeps import LAUNCHES as MODES
from emulated.sweeps import Sweep, assert_same_bits, launch_of
from inside.testing import SEQLENS

from gpu_actors.testing import BackwardCase, check_gradients, random_backward
from matrix.backward import assert_repeats, beyond_float16, of_unlike_heads

_KERNEL = "backward_sm90"
LAUNCHES = (
    ("late", "greedy", 0),
    ("eager", "lane", 1),
    ("random", "random", 2),
    ("late", "lane", 1),
    ("eager", "greedy", 1),
    ("late", "random", 3),
    ("random", "greedy", 0),
)

# More tiles of queries than stages, several of keys; rows and keys that end inside a tile.
_SHAPE: dict[str, Any] = {
    "dtype": "float16",
    "head_dim": 64,
    "varlen": False,
    "kind": "gaussian",
    "batch": 1,
    "heads": (1, 1),
    "features": (),
}
_PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": {"seqlens": (500, 300)},
    "ends": {"seqlens": (256, 256)},  # of tiles
    "one key": {"seqlens": (200, 1)},
    "sent": {"seqlens": (500, 300), "always": ("softcap",)},  # options send dQ through shared memory
    "wide": {"dtype": "bfloat16", "head_dim": 128, "seqlens": (300, 200)},
    "narrow": {"head_dim": 40, "seqlens": (200, 200)},
    "gqa": {"seqlens": (200, 200), "heads": (4, 2), "batch": 2},
    "causal": {"dtype": "bfloat16", "head_dim": 128, "seqlens": (300, 420), "always": ("causal",)},
    "few": {"seqlens": (400, 121), "always": ("causal",)},
    "varlen": {"seqlens": (300, 310), "varlen": True, "batch": 3, "heads": (2, 1), "always": ("causal",)},
    "varlen full": {"seqlens": (300, 310), "varlen": True, "batch": 3, "heads": (2, 1)},
    "long": {"seqlens": (500, 500), "varlen": True, "batch": 2},
    "window": {"seqlens": (400, 600), "always": ("window", "sink_tokens"), "alignment": "top_left"},
    "sinks": {"seqlens": (200, 100), "batch": 2, "heads": (2, 1), "always": ("sinks",)},
    "nonfinite": {"seqlens": (300, 300), "always": ("causal",)},
    "nonfinite q": {"seqlens": (300, 300), "always": ("causal",)},
    "nonfinite key": {"seqlens": (300, 300), "always": ("causal",)},
    "nonfinite value": {"seqlens": (300, 300), "always": ("causal",)},
    "unseen": {"seqlens": (100, 400), "always": ("causal",), "alignment": "top_left"},
    "negative": {"seqlens": (200, 300)},
    "neighbours": {"seqlens": (300, 310), "varlen": True, "batch": 2},
    "large": {"seqlens": (150, 200)},
    "opposite": {"seqlens": (150, 2)},
    "cap": {"seqlens": (150, 200), "kind": "peaked", "always": ("softcap",)},
    "alibi": {"seqlens": (150, 200), "always": ("alibi",)},
    "bias": {"seqlens": (150, 200), "always": ("bias", "causal")},
    "nonfinite bias": {"seqlens": (150, 200), "always": ("bias", "causal")},
    "hidden": {"seqlens": (150, 150), "always": ("bias",)},
    "dropout": {"seqlens": (150, 200), "heads": (2, 1), "always": ("dropout",)},
    "shared": {"dtype": "bfloat16", "head_dim": 256, "seqlens": (400, 150)},
    "shared causal": {"dtype": "bfloat16", "head_dim": 256, "seqlens": (300, 200), "always": ("causal",)},
    "shared mixed": {"dtype": "bfloat16", "head_dim": 192, "head_dim_v": 128, "seqlens": (500, 100), "heads": (2, 1)},
    "shared narrow": {"head_dim": 136, "head_dim_v": 200, "seqlens": (200, 100)},
    "shared nonfinite": {"dtype": "bfloat16", "head_dim": 256, "seqlens": (300, 200), "always": ("causal",)},
    "shared nonfinite key": {"dtype": "bfloat16", "head_dim": 256, "seqlens": (300, 200), "always": ("causal",)},
    "shared turns": {"dtype": "bfloat16", "head_dim": 256, "seqlens": (150, 400)},
    "cap bias": {"seqlens": (150, 200), "kind": "peaked", "always": ("bias", "softcap", "causal")},
    "nonfinite cap bias": {"seqlens": (150, 200), "always": ("bias", "softcap", "causal")},
    "turns": {"seqlens": (200, 700)},
    "turns bias": {"seqlens": (100, 200), "batch": 4, "heads": (4, 4), "always": ("bias",)},
}  # fmt: skip
_OPTIONS: dict[str, dict[str, Any]] = {"window": {"window_size": (150, 30), "sink_tokens": 5}}
_LAUNCH = {"kernel": _KERNEL}
_CHECKS: dict[str, Any] = {
    "empty": lambda: check_empty_sequences(_LAUNCH),
    "lse gradient": lambda: check_lse_gradient(_LAUNCH),
    "large causal": lambda: check_float16_range(_LAUNCH, 3000.0, 20.0, causal=True),
    # dS is 10^-6, with few bits in float16
    "small": lambda: check_float16_range(_LAUNCH, 1e-4, 1.0),
    "small causal": lambda: check_float16_range(_LAUNCH, 1e-4, 1.0, causal=True),
    # Kept weights count fourfold, which takes two of the powers of two that dQ is divided by at the end.
    "much dropout": lambda: check(_LAUNCH, *operands_of(150, 150), dropout_p=0.75),
    "far scratch": lambda: check_far_scratch(_KERNEL, "sm_90a"),
}
KERNELS = ("backward_prepare_sm90", _KERNEL, "backward_finish_sm90")
ROWS = (*_PROBLEMS, *_CHECKS)
# Other rows cover their options and paths, and test_backward.py repeats deterministic launches.
RARE = {
    *("turns bias", "neighbours", "long", "varlen full", "hidden", "nonfinite bias"),
    *("nonfinite cap bias", "shared narrow", "shared nonfinite", "shared nonfinite key", "far scratch"),
    *("bias", "shared causal"),
}


def run(row: str) -> None:
    """Raise AssertionError or EmulationFault if the row shows a difference."""
    if row in _CHECKS:
        _CHECKS[row]()
        return
    case = _problem(row)
    poisoned = poison_unseen_backward(case)
    deterministic, first = "turns" in row, None
    problem = backward_problem_of(*poisoned.forward.inputs, deterministic=deterministic, **poisoned.options)
    if row == "long":  # as if the caller gave too small lengths
        problem = dataclasses.replace(problem, seqlen_q=100, seqlen_k=100)
    operands = dict(zip(("dout", "q", "k", "v", "out", "lse"), poisoned.inputs, strict=True))
    operands |= {option: poisoned.options[option] for option in OPERANDS if option in poisoned.options}
    for delivery, schedule, seed in LAUNCHES:
        launch: dict[str, Any] = {"delivery": delivery, "schedule": schedule, "seed": seed, "limit_seconds": 20.0}
        if row == "turns bias":  # more blocks at a time than cores, so that the system's clock mixes them
            launch["threads"] = 8
        if deterministic:
            launch["arithmetic"] = "nearest"  # the errors of emulated hardware depend on a launch's seed
        seeds = {"dropout_seed": case.options.get("dropout_seed", 0)}
        gradients = gradients_of(problem, operands, kernel=_KERNEL, **seeds, **launch)
        if row == "neighbours":
            spoilt = {**operands, **_with_neighbours(case)}
            _check_first(gradients_of(problem, spoilt, kernel=_KERNEL, **launch), gradients, case)
        given = {"out": case.out, "lse": case.lse}
        check_gradients(gradients, *case.arguments, repro=case.repro, **given, **case.options)
        first = first or gradients
        if deterministic:
            assert_repeats(gradients, first)


def _problem(row: str) -> BackwardCase:
    case = random_backward(len(row), **{**_SHAPE, **_PROBLEMS[row]})
    if row == "turns bias":  # shared by every sequence and head
        shared = np.ascontiguousarray(case.options["bias"][:1, :1]).astype(np.float32)
        case = answered(case, {**case.options, "bias": shared})
    if row == "hidden":
        case = answered(case, {**case.options, "bias": hide_first(case.options["bias"])})
    if row in ("large", "opposite"):
        case = beyond_float16(case, row)
    if row == "gqa":
        case = of_unlike_heads(case)
    if row == "negative":  # scores so low that the weight of a key past the end is infinite
        case.forward.q[...] += 4
        case.forward.k[...] -= 4
        case = answered(case, case.options)
    if row in ("turns", "shared turns"):
        case = cancelling(case)
    if row in _OPTIONS:
        case = answered(case, {**case.options, **_OPTIONS[row]})
    if row in ("nonfinite bias", "nonfinite cap bias"):
        case.dout[0, 60, :, 3] = np.nan
    if row == "shared nonfinite":
        case.dout[0, 150, :, 200] = np.nan
    if row == "shared nonfinite key":
        case.forward.k[0, 100, :, 3] = np.nan
        case.lse[0, :, 200:], case.out[0, 200:] = np.nan, np.nan
    if row == "nonfinite":
        case.dout[0, 240, :, 3] = np.nan
    if row == "nonfinite q":
        case.forward.q[0, 140, :, 3] = np.nan
        case.lse[0, :, 140], case.out[0, 140] = np.nan, np.nan
    if row == "nonfinite key":
        case.forward.k[0, 140, :, 3] = np.nan
        case.lse[0, :, 140:], case.out[0, 140:] = np.nan, np.nan
    if row == "nonfinite value":
        case.forward.v[0, 140, :, 3] = np.nan
        case.out[0, 140:, :, 3] = np.nan
    return case


def cancelling(case: BackwardCase) -> BackwardCase:
    """A row's dS add up to 0 over the keys, so with larger keys the parts of dQ grow and cancel: 16 bits show their
    order."""
    case.forward.k[...] += 64
    return answered(case, case.options)


def _with_neighbours(case: BackwardCase) -> dict[str, Any]:
    """The inputs by name, with NaN in the second sequence, which the first one's tiles reach into."""
    names = ("dout", "q", "k", "v", "out", "lse")
    arrays = {name: array.copy() for name, array in zip(names, case.inputs, strict=True)}
    rows, keys = (case.options[f"cu_seqlens_{side}"][1] for side in "qk")
    for name in names[:-1]:
        arrays[name][keys if name in "kv" else rows :] = np.nan
    arrays["lse"][:, rows:] = np.nan
    return arrays


def _check_first(gradients: Any, clean: Any, case: BackwardCase) -> None:
    """The second sequence does not change dK and dV of the first, nor dQ but for the order of its sums."""
    rows, keys = (case.options[f"cu_seqlens_{side}"][1] for side in "qk")
    for name, end in (("dk", keys), ("dv", keys)):
        np.testing.assert_array_equal(getattr(gradients, name)[:end], getattr(clean, name)[:end], err_msg=name)
    found, wanted = (result.dq[:rows].astype(float) for result in (gradients, clean))
    np.testing.assert_allclose(found, wanted, rtol=0.01, atol=0.01, err_msg="dq")


# Every option alone or combined, every row of the tile table, both layouts, both alignments.
SWEEPS = (
    Sweep("bfloat16", 128, None, "causal"),
    Sweep("float16", 64, None, ""),
    Sweep("bfloat16", 64, None, "causal window sink_tokens sinks", varlen=True, top_left=True),
    Sweep("bfloat16", 128, None, ""),
    Sweep("float16", 128, None, "causal", varlen=True, deterministic=True),
    Sweep("bfloat16", 40, 64, "window", top_left=True),
    Sweep("float16", 96, None, "causal sinks", deterministic=True),
    Sweep("bfloat16", 64, 104, "scale", varlen=True),
    Sweep("float16", 80, None, "window sink_tokens", deterministic=True),
    Sweep("float16", 64, None, "dropout bias alibi sinks", deterministic=True),
    Sweep("bfloat16", 128, None, "causal softcap", top_left=True),
    Sweep("bfloat16", 128, None, "causal bias"),
    Sweep("float16", 128, 72, "softcap alibi", varlen=True),
    Sweep("bfloat16", 64, None, "causal window sink_tokens softcap alibi dropout sinks", varlen=True, top_left=True),
    Sweep("float16", 96, None, "window dropout", deterministic=True),
    Sweep("bfloat16", 128, None, "bias dropout window sink_tokens", deterministic=True),
    Sweep("bfloat16", 128, None, "causal bias softcap", deterministic=True),
    Sweep("float16", 72, None, "window bias softcap alibi dropout"),
    Sweep("bfloat16", 256, None, "causal", deterministic=True),
    Sweep("float16", 256, 200, ""),
    Sweep("float16", 192, 128, "causal window sink_tokens sinks", varlen=True, top_left=True),
    Sweep("bfloat16", 192, 128, "softcap alibi", deterministic=True),
    Sweep("bfloat16", 160, 192, "scale", varlen=True),
    Sweep("float16", 192, None, "bias dropout causal", deterministic=True),
    Sweep("bfloat16", 256, None, "causal window sink_tokens softcap alibi dropout sinks", varlen=True, top_left=True),
    Sweep("float16", 256, None, "bias alibi window", deterministic=True),
    Sweep("bfloat16", 64, 136, "dropout causal"),
)
_VARIANTS = {str(sweep): (number, sweep) for number, sweep in enumerate(SWEEPS)}
_SHAPES = ((1, 1), (33, 95), (70, 31), (113, 203), (130, 7), (400, 300))
GRID = tuple(_VARIANTS)
USUAL: frozenset[str] = frozenset()


def run_variant(variant: str, *, thorough: bool) -> None:
    """Raise AssertionError or EmulationFault if a shape shows a difference."""
    number, sweep = _VARIANTS[variant]
    for index, seqlens in enumerate((*_SHAPES, *SEQLENS) if thorough else _SHAPES):
        large = max(seqlens) > 300
        heads = (2, 1) if large else ((6, 2), (3, 1), (2, 2))[index % 3]
        case = case_of(sweep, 1000 * number + index, seqlens, batch=1 if large else 1 + index % 3, heads=heads)
        launch = {"kernel": _KERNEL, "seed": index, "limit_seconds": 600.0, **launch_of(5 * index + number)}
        check_case(case, deterministic=sweep.deterministic, **launch)
    if thorough:
        _check_modes(sweep, (420, 300))


def _check_modes(sweep: Sweep, seqlens: tuple[int, int]) -> None:
    """Right in every mode. dK and dV have the same bits in all modes, and dQ if deterministic."""
    case = poison_unseen_backward(case_of(sweep, 5, seqlens, batch=1, heads=(2, 1)))
    # With the hardware's arithmetic, functions would err by other amounts for each seed.
    same = {"kernel": _KERNEL, "deterministic": sweep.deterministic, "arithmetic": "nearest"}
    results = [run_case(case, seed=seed, **same, **launch_of(seed)) for seed in range(len(MODES))]
    for result in results:
        given = {"out": case.out, "lse": case.lse}
        check_gradients(result, *case.arguments, repro=case.repro, **given, **case.options)
    names = ("dq", "dk", "dv") if sweep.deterministic else ("dk", "dv")
    assert_same_bits([[getattr(result, name) for name in names] for result in results])
