"""Packs where the largest score of a row and the sum of its exponentials go: ``RowStats`` of common/row_stats.cuh."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from gpu_actors.attention.problem import AttentionProblem
from gpu_actors.devices.interface import Buffer
from gpu_actors.kernels.params import Binder, struct_layout

__all__ = ["pack_row_stats", "row_stats_layout"]

row_stats_layout = functools.partial(struct_layout, "RowStats", "common/params.cuh", "common/row_stats.cuh")


def pack_row_stats(problem: AttentionProblem, buffers: Mapping[str, Buffer]) -> bytes:
    """The bytes that follow a launch's Params where the problem has one of these outputs, else none.

    buffers: score_max and score_sum_exp, float32 of the LSE's shape, of which the problem may have one alone.
    Raises InvalidRequest for one that is missing or not as described.
    """
    return _binder(problem).pack(buffers) if problem.row_stats else b""


@functools.lru_cache(maxsize=256)
def _binder(problem: AttentionProblem) -> Binder:
    layout, shape = row_stats_layout(), problem.lse_shape
    names = [name for name in ("score_max", "score_sum_exp") if getattr(problem, name)]
    return Binder.of(layout, [layout.operand(name, "bhr"[3 - len(shape) :], shape, "float32") for name in names])
