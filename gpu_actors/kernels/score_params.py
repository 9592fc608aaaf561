"""Packs what a score modification reads: ``ScoreParams`` of its generated header, which follows a kernel's Params."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from gpu_actors.attention.problem import AttentionProblem
from gpu_actors.attention.score_mod import ScoreMod
from gpu_actors.devices.interface import Buffer
from gpu_actors.kernels.params import Binder, ParamsLayout, parse_layout
from gpu_actors.kernels.program import Pack, Values

__all__ = ["score_layout", "score_packer"]

_ALIGNMENT = 8  # of the struct that holds Params and ScoreParams
_AXES = "bhrk"


def score_layout(mod: ScoreMod) -> ParamsLayout | None:
    """struct ScoreParams of the modification's header, or None where it reads nothing."""
    if not mod.tensors and not mod.scalars:
        return None
    return parse_layout(mod.header, "ScoreParams")


def score_packer(problem: AttentionProblem) -> Pack | None:
    """What packs the bytes that follow a launch's own parameters, or None if there are none.

    Its buffers: ``ScoreMod.tensor_name(n)`` of every tensor, (batch or 1, heads_q or 1, seqlen_q or 1, seqlen_k or 1),
    any strides.
    """
    mod = problem.score_mod
    layout = None if mod is None else score_layout(mod)
    if mod is None or layout is None:
        return None
    binder = functools.cache(lambda: _binder(problem, mod, layout))

    def pack(buffers: Mapping[str, Buffer], values: Values) -> bytes:
        packed = binder().pack(buffers, {f"v{n}": value for n, value in enumerate(values.score_scalars)})
        return packed + bytes(-len(packed) % _ALIGNMENT)

    return pack


def _binder(problem: AttentionProblem, mod: ScoreMod, layout: ParamsLayout) -> Binder:
    lengths = (problem.seqlen_q, problem.seqlen_k)
    extents = dict(zip(_AXES, (problem.batch, problem.heads_q, *lengths), strict=True))
    if mod.block_size is not None:
        extents |= {axis: -(-n // step) for axis, n, step in zip("RK", lengths, mod.block_size, strict=True)}
    operands = []
    for n, tensor in enumerate(mod.tensors):
        axes = tensor.blocks or _AXES
        wanted = tuple(extents[axis] if axis in tensor.axes else 1 for axis in axes)
        strides = [f"t{n}_{axis}" if axis in tensor.axes else "" for axis in axes]
        operands.append(layout.operand(mod.tensor_name(n), strides, wanted, tensor.dtype, field=f"t{n}"))
    return Binder.of(layout, operands)
