"""Packs a backward problem and its operands into the bytes of struct BackwardParams.

The struct is declared once, in kernels_cu/backward_params.cuh, and holds the forward's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gpu_actors.devices.interface import Buffer
from gpu_actors.errors import InvalidRequest
from gpu_actors.kernels.arguments import (
    Operand,
    ParamsLayout,
    checked_address,
    describe_operand,
    forward_operands,
    forward_scalars,
    parse_layout,
)
from gpu_actors.kernels.assets import asset_text
from gpu_actors.kernels.score_arguments import pack_score
from gpu_actors.problem import AttentionProblem

__all__ = ["backward_layout", "pack_backward", "pack_backward_part"]

_HEADERS = ("forward_params.cuh", "backward_params.cuh")
_FORWARD = "forward."
# Memory that only the kernels know, which has the shapes of `backward_scratch`.
_SCRATCH = ("statistics", "dq_sums", "dq_turns", "dbias_sums", "dbias_turns", "dsinks_parts")


@functools.cache
def backward_layout() -> ParamsLayout:
    """struct BackwardParams of kernels_cu/backward_params.cuh. The forward's fields are named "forward.q" and so on."""
    return parse_layout("\n".join(asset_text(name) for name in _HEADERS), "BackwardParams")


def pack_backward(
    problem: AttentionProblem,
    buffers: Mapping[str, Buffer],
    *,
    dropout_seed: int = 0,
    score_scalars: Sequence[float] = (),
) -> bytes:
    """The parameters of backward_mma, those of the problem's score modification included.

    buffers: the forward's operands, out and lse as `pack_forward` describes them, and by name: dout like out; dq, dk
        and dv like q, k and v; dbias like bias, without gaps; dsinks like sinks; dlse like lse, or missing; the scratch
        of `backward_scratch`. Only what the problem asks for is looked at.
    dropout_seed: 0 <= seed < 2^64. score_scalars: of the problem's score modification.
    Raises InvalidRequest for an operand that is missing or not as described.
    """
    packed = pack_backward_part(problem, buffers, dropout_seed=dropout_seed)
    return packed + pack_score(problem, buffers, score_scalars)


def pack_backward_part(
    problem: AttentionProblem,
    buffers: Mapping[str, Buffer],
    *,
    dropout_seed: int = 0,
    score_scalars: Sequence[float] = (),
) -> bytes:
    """The parameters of backward_prepare and backward_finish, which know no scores. Arguments as in `pack_backward`."""
    layout, plan = backward_layout(), _plan(problem)
    values = list(plan.values)
    for operand in plan.operands:
        buffer = buffers.get(operand.name)
        if buffer is None and operand.optional:
            continue
        values[operand.address] = checked_address(operand, buffer)
        assert buffer is not None
        for axis, index in operand.strides:
            values[index] = buffer.strides[axis]
    for name in _SCRATCH:
        if name in buffers:
            values[layout.positions[name]] = buffers[name].address
    if problem.bias is not None and problem.bias[0] == "float32":
        values[layout.positions["dbias_sums"]] = buffers["dbias"].address
    if problem.dropout_p:
        if not 0 <= dropout_seed < 1 << 64:
            raise InvalidRequest("dropout_seed", dropout_seed, "the seed is an unsigned 64-bit integer")
        values[layout.positions["forward.dropout_seed"]] = dropout_seed
    if problem.sinks:
        values[layout.positions["forward.sinks_are_float"]] = buffers["sinks"].dtype == "float32"
        if buffers["dsinks"].dtype != buffers["sinks"].dtype:
            raise InvalidRequest("dsinks", buffers["dsinks"].dtype, f"has the sinks' dtype, {buffers['sinks'].dtype}")
    return layout.pack(values)


class _Plan(NamedTuple):
    """What packing a problem comes down to. values: of every field, those of operands still 0."""

    values: tuple[int | float, ...]
    operands: tuple[Operand, ...]


@functools.lru_cache(maxsize=1024)
def _plan(problem: AttentionProblem) -> _Plan:
    layout = backward_layout()
    values: list[int | float] = [0] * len(layout.fields)
    for name, value in forward_scalars(problem).items():
        values[layout.positions[_FORWARD + name]] = value
    values[layout.positions["batch"]] = problem.batch
    operands = tuple(_operands(problem, layout))
    dbias = next((operand for operand in operands if operand.name == "dbias"), None)
    if dbias is not None:
        # The kernels find its sums, which have no gaps either, by the same strides.
        batch, heads, rows, keys = dbias.shape
        values[layout.positions["dbias_size"]] = batch * heads * rows * keys
    return _Plan(tuple(values), operands)


def _operands(problem: AttentionProblem, layout: ParamsLayout) -> Iterator[Operand]:
    shapes = {
        operand.name: operand
        for operand in forward_operands(dataclasses.replace(problem, return_lse=True), layout, _FORWARD)
    }
    yield from shapes.values()
    operand = functools.partial(describe_operand, layout)
    varlen = problem.layout == "varlen"
    axes, lse_axes = ("rh.", "hr") if varlen else ("brh.", "bhr")
    yield operand("dout", axes, shapes["out"].shape, problem.out_dtype)
    yield operand("dlse", lse_axes, shapes["lse"].shape, "float32", optional=True)
    for name in ("q", "k", "v"):
        yield operand(f"d{name}", axes, shapes[name].shape, *shapes[name].dtypes)
    if problem.bias is not None:
        yield operand("dbias", "bhr.", shapes["bias"].shape, problem.bias[0])
    if problem.sinks:
        yield Operand("dsinks", shapes["sinks"].shape, shapes["sinks"].dtypes, False, layout.positions["dsinks"], (), 0)
