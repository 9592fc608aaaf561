"""Packs a backward problem and its operands into the bytes of struct BackwardParams.

The struct is declared once, in kernels_cu/backward/params.cuh, and holds the forward's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

from gpu_actors.attention.problem import AttentionProblem
from gpu_actors.devices.interface import Buffer
from gpu_actors.errors import InvalidRequest
from gpu_actors.kernels.backward.shared import part_dtype
from gpu_actors.kernels.params import (
    Binder,
    Operand,
    ParamsLayout,
    forward_operands,
    forward_scalars,
    launch_values,
    struct_layout,
)
from gpu_actors.kernels.program import Values
from gpu_actors.kernels.score_params import pack_score

__all__ = ["pack_backward"]

_FORWARD = "forward."
# Scratch memory of the kernels, of the shapes that `backward_scratch` gives.
_SCRATCH = ("statistics", "dq_sums", "dq_turns", "dbias_sums", "dbias_turns", "dsinks_parts", "tickets", "ds_bounds")


def pack_backward(
    problem: AttentionProblem, scored: bool, buffers: Mapping[str, Buffer], values: Values, number: int = 0
) -> bytes:
    """The parameters of one of the kernels of a gradient.

    scored: those of the problem's score modification included, which the kernels before and after the products do not
        know. number: of the pass, for backward_simple.
    buffers: the forward's operands, out and lse as `pack_forward` describes them, and by name: dout like out; dq, dk
        and dv like q, k and v, or in the place of those that sequences share what `sum_scratch` gives; dbias like bias,
        without gaps; dsinks like sinks; dlse like lse, or missing; the scratch of `backward_scratch`. Only what the
        problem asks for is looked at.
    Raises InvalidRequest for an operand that is missing or not as described, and for a seed that is none.
    """
    more = launch_values(problem, buffers, values.dropout_seed, _FORWARD)
    more |= {name: buffers[name].address for name in _SCRATCH if name in buffers}
    if problem.bias is not None and problem.bias[0] == "float32" and "dbias" in buffers:
        more["dbias_sums"] = buffers["dbias"].address
    packed = _binder(problem).pack(buffers, more | {"pass": number})
    if problem.sinks and buffers["dsinks"].dtype != buffers["sinks"].dtype:
        raise InvalidRequest("dsinks", buffers["dsinks"].dtype, f"has the sinks' dtype, {buffers['sinks'].dtype}")
    return packed + pack_score(problem, buffers, values.score_scalars) if scored else packed


@functools.lru_cache(maxsize=1024)
def _binder(problem: AttentionProblem) -> Binder:
    layout = struct_layout("BackwardParams", "common/params.cuh", "backward/params.cuh")
    operands = tuple(_operands(problem, layout))
    scalars = forward_scalars(problem, _FORWARD) | {"batch": problem.batch}
    for operand in operands:
        if operand.name == "dbias":
            # The kernels use the same strides for its sums, which have no gaps either.
            scalars["dbias_size"] = math.prod(operand.shape)
    return Binder.of(layout, operands, scalars)


def _operands(problem: AttentionProblem, layout: ParamsLayout) -> Iterator[Operand]:
    shapes = {
        operand.name: operand
        for operand in forward_operands(dataclasses.replace(problem, return_lse=True), layout, _FORWARD)
    }
    yield from shapes.values()
    operand = layout.operand
    varlen = problem.layout == "varlen"
    axes, lse_axes = ("rh.", "hr") if varlen else ("brh.", "bhr")
    yield operand("dout", axes, shapes["out"].shape, problem.out_dtype)
    yield operand("dlse", lse_axes, shapes["lse"].shape, "float32", optional=True)
    for name in ("q", "k", "v"):
        if name in problem.summed:
            yield operand(f"d{name}_parts", axes, shapes[name].shape, part_dtype(problem), field=f"d{name}")
        else:
            yield operand(f"d{name}", axes, shapes[name].shape, *shapes[name].dtypes)
    if problem.dbias:
        yield operand("dbias", "bhr.", shapes["bias"].shape, *shapes["bias"].dtypes)
    if problem.sinks:
        yield operand("dsinks", ".", shapes["sinks"].shape, *shapes["sinks"].dtypes)
