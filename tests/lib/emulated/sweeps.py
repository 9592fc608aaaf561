"""Sweeps: compiled variants of forward and backward kernels, and their random problems, deliveries and schedules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from cases.finite_masks import hide_keys

from gpu_actors.testing import ForwardCase, random_forward

__all__ = ["DELIVERIES", "LAUNCHES", "SCHEDULES", "Sweep", "assert_same_bits", "case_of", "launch_of"]

DELIVERIES = ("late", "eager", "random")
SCHEDULES = ("greedy", "lane", "random", "round_robin")
LAUNCHES = tuple(itertools.product(DELIVERIES, SCHEDULES))


@dataclass(frozen=True)
class Sweep:
    """One compiled variant, and how it is selected.

    always: the options of every problem, separated by spaces. deterministic: for gradients. usual: whether
    `matrix.backward` compiles it in the default test run.
    """

    dtype: str
    head_dim: int
    head_dim_v: int | None
    always: str
    _: KW_ONLY
    compute: str | None = None
    arch: str = "sm_90a"
    varlen: bool = False
    top_left: bool = False
    deterministic: bool = False
    usual: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(self.always.split())

    @property
    def alignment(self) -> str:
        return "top_left" if self.top_left else "bottom_right"

    def __str__(self) -> str:
        dims = str(self.head_dim) if self.head_dim_v is None else f"{self.head_dim}/{self.head_dim_v}"
        layout = "varlen" if self.varlen else "dense"
        return "-".join([self.compute or self.dtype, dims, self.arch, layout, self.alignment, *self.options])


def case_of(sweep: Sweep, number: int, index: int, seqlens: tuple[int, int], **arguments: Any) -> ForwardCase:
    """Problem ``index`` of the sweep with that number; batch and heads vary in turn. Every second bias hides keys."""
    case = random_forward(
        1000 * number + index,
        dtype=sweep.dtype,
        head_dim=sweep.head_dim,
        head_dim_v=sweep.head_dim_v,
        varlen=sweep.varlen,
        seqlens=seqlens,
        batch=1 + index % 3,
        heads=((6, 2), (3, 1), (2, 2))[index % 3],
        features=(),
        always=sweep.options,
        alignment=sweep.alignment,
        **arguments,
    )
    if "bias" in case.options and index % 2:
        case.options["bias"] = hide_keys(case.options["bias"], index)
    return case


def launch_of(number: int) -> dict[str, str]:
    """A delivery and a schedule; consecutive numbers go through all of them."""
    delivery, schedule = LAUNCHES[number % len(LAUNCHES)]
    return {"delivery": delivery, "schedule": schedule}


def assert_same_bits(results: Sequence[Sequence[Any]]) -> None:
    """Every result holds the arrays of the first one, bit for bit."""
    for result in results[1:]:
        for array, first in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(array, first)
