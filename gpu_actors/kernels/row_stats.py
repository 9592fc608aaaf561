"""Packs where the largest score of a row and the sum of its exponentials go: ``RowStats`` of common/row_stats.cuh."""

from __future__ import annotations

import functools

from gpu_actors.attention.problem import AttentionProblem
from gpu_actors.kernels.params import Binder, struct_layout
from gpu_actors.kernels.program import Pack

__all__ = ["row_stats_layout", "row_stats_packer"]

row_stats_layout = functools.partial(struct_layout, "RowStats", "common/params.cuh", "common/row_stats.cuh")


def row_stats_packer(problem: AttentionProblem) -> Pack | None:
    """What packs the bytes that follow a launch's Params, or None if the problem has none of these outputs.

    Its buffers: score_max and score_sum_exp, float32 of the LSE's shape, of which the problem may have one alone.
    It raises InvalidRequest for one that is missing or not as described.
    """
    if not problem.row_stats:
        return None
    layout, shape = row_stats_layout(), problem.lse_shape
    names = [name for name in ("score_max", "score_sum_exp") if getattr(problem, name)]
    operands = [layout.operand(name, "bhr"[3 - len(shape) :], shape, "float32") for name in names]
    binder = Binder.of(layout, operands)
    return lambda buffers, values: binder.pack(buffers)
