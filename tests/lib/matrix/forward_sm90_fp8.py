"""Hard problems of forward_sm90 on 8-bit floats.

The bound is the tolerance rule's for kernels that round the weights to 8 bits (`weights_dtype`): pt has that rounding
too, and its error, taken weight by weight, is below 2.5 * 2^-4 sqrt(sum P^2 V^2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from cases.forward_edges import edge_case
from cases.large_scores import check_large
from cases.many_keys import E4M3, check_many_keys, many_keys
from cases.poison import poison_unseen
from cases.steady_scores import check_steady
from emulated import forward as emulated_forward
from emulated.contraction import like_hardware
from emulated.forward import problem_of, run_case
from emulated.forward import run as run_kernel
from emulated.sweeps import Sweep, case_of, launch_of
from inside.emulation import EmulatedModule
from inside.testing import SEQLENS

from gpu_actors import KernelSource
from gpu_actors.testing import ForwardCase, check_output, random_forward
from matrix.forward_sm90 import check_neighbours

_KERNEL = "forward_sm90"
_E5M2 = "float8_e5m2"
LAUNCHES = (("late", "greedy", 0), ("eager", "lane", 1), ("random", "random", 2), ("late", "lane", 1))

# The code that computes nonfinite rows again would correct a NaN that is a mistake.
_NONFINITE = "forward_sm90/nonfinite.cuh"
_MENDING = "if ((found[0] | found[1]) == 0) return;"

# More tiles of keys than stages, more tiles of rows than the two blocks. "unmended" is "odd" on kernels of `unmended`.
_SHAPE: dict[str, Any] = {
    "dtype": E4M3,
    "head_dim": 64,
    "varlen": False,
    "batch": 1,
    "heads": (2, 1),
    "features": (),
    "kind": "gaussian",
}
_CAUSAL = ("causal", "descales")
_PROBLEMS: dict[str, dict[str, Any]] = {
    "causal": {"seqlens": (300, 600), "always": _CAUSAL, "kind": "rising"},
    "odd": {"seqlens": (130, 301)},
    "one key": {"seqlens": (130, 1), "always": _CAUSAL},
    "keyless": {"seqlens": (900, 21), "always": _CAUSAL},
    "batch": {"seqlens": (150, 200), "batch": 2, "heads": (3, 3), "always": _CAUSAL},
    "varlen": {"seqlens": (130, 300), "varlen": True, "batch": 4, "always": _CAUSAL},
    "wide tile": {"head_dim": 128, "seqlens": (130, 700), "always": ("descales",)},
    "beside": {"head_dim": 128, "seqlens": (130, 500), "always": _CAUSAL},
    "wide head": {"head_dim": 256, "seqlens": (130, 500), "always": ("descales",), "kind": "rising"},
    "faint": {"seqlens": (70, 601), "heads": (1, 1)},
    "e5m2": {"dtype": _E5M2, "seqlens": (130, 300), "always": _CAUSAL},
    "e5m2 faint": {"dtype": _E5M2, "seqlens": (70, 601), "heads": (1, 1)},
    "nonfinite": {"seqlens": (200, 200), "always": _CAUSAL},
    "negative": {"seqlens": (300, 300), "always": _CAUSAL},
    "vanishing": {"seqlens": (150, 200), "always": _CAUSAL},
    "zero": {"seqlens": (150, 200), "always": _CAUSAL},
    "nan": {"seqlens": (200, 70), "always": _CAUSAL},
    "capped": {"seqlens": (70, 70), "always": ("softcap", "descales")},
}
# The kernel takes maxima of products before they are scaled, and only a positive factor keeps them maxima.
_Q_DESCALE = {"negative": -1.5, "vanishing": -1e-30, "zero": 0.0, "nan": np.nan, "capped": np.inf}
_EDGES = ("empty sequences", "own key")
KERNELS = (_KERNEL,)
ROWS = (
    *_PROBLEMS,
    *_EDGES,
    "odd, like hardware",
    "unmended",
    "neighbours",
    "many keys",
    "many keys in every mode",
    "low",
    "steady",
)
RARE = frozenset({"odd", "beside", "e5m2 faint", "vanishing", "own key", "many keys in every mode", "low"})


def _case_of(row: str) -> ForwardCase:
    if row in _EDGES:
        return edge_case(row, E4M3, 64)
    case = poison_unseen(random_forward(len(row), **{**_SHAPE, **_PROBLEMS[row]}))
    if row == "nonfinite":
        case.v[0, 100, :, 3] = np.nan
    if row in ("faint", "e5m2 faint"):  # one key of the largest weight, and many that e4m3 would round to 0
        arrays = {part: np.zeros(array.shape) for part, array in zip("qkv", case.inputs, strict=True)}
        arrays["q"][..., 0], arrays["k"][:, 0, :, 0], arrays["v"][:, 1:] = 8.0, 7.0, 1.0
        scale = {"softmax_scale": 0.125}
        cast = {part: array.astype(case.q.dtype) for part, array in arrays.items()}
        return dataclasses.replace(case, **cast, options={**case.options, **scale})
    if row in _Q_DESCALE:
        value = np.full_like(case.options["q_descale"], _Q_DESCALE[row])
        return dataclasses.replace(case, options={**case.options, "q_descale": value})
    return case


def run(row: str) -> None:
    """Raise AssertionError or EmulationFault if the row shows a difference."""
    if row == "steady":
        check_steady(_KERNEL, E4M3)
    elif row == "low":
        check_large(row, _KERNEL, E4M3, 64, "sm_90a")
    elif row == "many keys":
        _check_sums(64)
    elif row == "odd, like hardware":
        with like_hardware():
            run("odd")
    else:
        for delivery, schedule, seed in LAUNCHES:
            _run_launch(row, {"delivery": delivery, "schedule": schedule, "seed": seed, "limit_seconds": 60.0})


def _run_launch(row: str, launch: dict[str, Any]) -> None:
    if row == "neighbours":
        check_neighbours(E4M3, 170, causal=False, kernel=_KERNEL, **launch)
    elif row == "many keys in every mode":
        for dim in (64, 128, 256):
            _check_sums(dim, **launch | {"limit_seconds": 600.0})
    elif row == "unmended":
        with unmended():
            _check_case(_case_of("odd"), multiprocessors=2, **launch)
    else:
        _check_case(_case_of(row), multiprocessors=2, **launch)


def _check_case(case: ForwardCase, **launch: Any) -> None:
    out, lse = run_case(case, kernel=_KERNEL, **launch)
    check_output(out, lse, *case.inputs, repro=case.repro, weights_dtype=E4M3, **case.options)


@contextmanager
def unmended() -> Iterator[None]:
    """Have `emulated_forward` build kernels that do not compute nonfinite rows again."""
    build = emulated_forward.module_of

    def without(source: KernelSource) -> EmulatedModule:
        text = source.headers[_NONFINITE]
        assert text.count(_MENDING) == 1
        return build(
            dataclasses.replace(source, headers={**source.headers, _NONFINITE: text.replace(_MENDING, "return;")})
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulated_forward, "module_of", without)
        yield


def _check_sums(head_dim: int, **launch: Any) -> None:
    """Sums over many keys keep what tensor cores would cut off, which keep 13 fraction bits of a sum."""
    q, k, v = many_keys(32768, head_dim)
    answer = run_kernel(problem_of(q, k, v), {"q": q, "k": k, "v": v}, kernel=_KERNEL, multiprocessors=1, **launch)
    check_many_keys(*answer, q, k, v)


# Every row of the tile table, both layouts, all options, and padded head dims.
SWEEPS = (
    Sweep(E4M3, 64, 64, "causal descales"),
    Sweep(E4M3, 128, 128, "causal window sink_tokens sinks descales", varlen=True, top_left=True),
    Sweep(E4M3, 128, 128, "descales"),
    Sweep(E4M3, 64, 64, "", varlen=True),
    Sweep(E4M3, 96, 48, "window softcap descales"),
    Sweep(E4M3, 128, 128, "causal alibi descales"),
    Sweep(E4M3, 192, 128, "causal descales", varlen=True),
    Sweep(E4M3, 256, 256, "causal"),
    Sweep(E4M3, 256, 176, "window sink_tokens sinks alibi softcap descales", varlen=True),
    Sweep(E4M3, 32, 208, "causal window alibi descales", varlen=True),
    # Here the weights are e4m3 too.
    Sweep(_E5M2, 64, 64, "causal descales"),
    Sweep(_E5M2, 128, 128, "descales", varlen=True),
    Sweep(_E5M2, 96, 128, "causal window sinks softcap descales"),
    Sweep(_E5M2, 192, 256, "causal alibi descales", varlen=True),
    Sweep(_E5M2, 256, 256, ""),
    Sweep(E4M3, 16, 32, "causal"),
)
_VARIANTS = {str(sweep): (number, sweep) for number, sweep in enumerate(SWEEPS)}
_SHAPES = ((1, 1), (33, 95), (70, 31), (113, 203), (130, 7), (200, 450))
GRID = tuple(_VARIANTS)
USUAL = (str(SWEEPS[1]),)


def run_variant(variant: str, *, thorough: bool) -> None:
    """Raise AssertionError or EmulationFault if a shape shows a difference."""
    number, sweep = _VARIANTS[variant]
    for index, seqlens in enumerate(_SHAPES + (SEQLENS if thorough else ())):
        case = poison_unseen(case_of(sweep, number, index, seqlens))
        for n in range(2 if thorough else 1):
            launch = launch_of(5 * index + number + 7 * n)
            _check_case(case, multiprocessors=(1, 3, None)[(index + n) % 3], seed=index, **launch)
    if thorough:  # rows of finite values are right without computing them again
        with unmended():
            for index, seqlens in enumerate(_SHAPES[-2:]):
                _check_case(case_of(sweep, number, index, seqlens), multiprocessors=3)
