"""head_split: divides an attention request over several workers, each with some of the heads (tensor parallel).

Heads are independent in attention, so nothing is merged. The answer is bit-identical to one context's, if the same
kernel computes both and splits no keys (docs/distributed.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpu_actors.arrays.adopt import Adopted
from gpu_actors.attention.requests import AttentionGradients, AttentionOutput, FlashBackward, FlashForward
from gpu_actors.distributed.parts import ask_parts, check_forward, host_operands, restored
from gpu_actors.distributed.pool import ContextPool
from gpu_actors.errors import Unsupported
from gpu_actors.fields import describe, expect, integer
from gpu_actors.values import show

__all__ = ["head_split", "head_split_backward"]

# The axis of q's heads in the operands that have them, counted from the end.
_OF_Q = {"q": -2, "dout": -2, "out": -2, "lse": -2, "bias": -3, "alibi_slopes": -1, "sinks": -1}
# The axis of k's heads.
_OF_K = {"k": -2, "v": -2, "q_descale": -1, "k_descale": -1, "v_descale": -1}


async def head_split(
    pool: ContextPool, request: FlashForward, *, parts: int, timeout: float | None = None
) -> AttentionOutput:
    """Answer a forward request with ``parts`` workers of a pool. Each computes its share of the heads.

    request: over arrays on the host. Each part has heads_kv / parts heads of k and v and the heads of q that read them,
    with their slopes, sinks, bias and descales. Dropout counts the heads of the whole request.
    parts: must divide heads_kv. Each part goes to a worker that has none yet, while there is such a worker. A lost
    worker's part is repeated as `ContextPool.ask` does. timeout: seconds for each part.

    Raises `InvalidRequest` for operands whose heads do not agree, `Unsupported` for ``parts`` that do not divide
    heads_kv and for an ``out``; and what the pool raises.
    """
    check_forward(request)
    operands = host_operands(request, (*_OF_Q, *_OF_K))
    return _joined(await _answers(pool, request, operands, parts, timeout), operands)


async def head_split_backward(
    pool: ContextPool, request: FlashBackward, *, parts: int, timeout: float | None = None
) -> AttentionGradients:
    """`head_split` for gradients. The gradients of a bias that all heads share are summed over the parts."""
    expect(type(request) is FlashBackward, "request", show(request), "must be a FlashBackward")
    operands = host_operands(request, (*_OF_Q, *_OF_K))
    return _joined_gradients(await _answers(pool, request, operands, parts, timeout), operands)


async def _answers(
    pool: ContextPool, request: FlashForward, operands: Mapping[str, Adopted], parts: int, timeout: float | None
) -> list[Any]:
    count = integer("parts", parts, 1)
    heads, heads_kv = _heads(operands)
    if heads_kv % count:
        nearest = max(number for number in range(1, count) if heads_kv % number == 0)
        raise Unsupported("parts", parts, f"must divide heads_kv, {heads_kv}", nearest)
    split = [_part(request, operands, (heads, heads_kv), (index, count)) for index in range(count)]
    return await ask_parts(pool, list(enumerate(split)), timeout)


def _heads(operands: Mapping[str, Adopted]) -> tuple[int, int]:
    counts = []
    for name in ("q", "k"):
        array: Any = operands[name].array if name in operands else None
        sound = array is not None and array.ndim >= 3
        expect(sound, name, describe(array), "must be (..., rows, heads, head_dim)")
        counts.append(int(array.shape[-2]))
    heads, heads_kv = counts
    sound = heads > 0 and heads_kv > 0 and heads % heads_kv == 0
    expect(sound, "q", describe(operands["q"].array), f"must have a multiple of k's heads, {heads_kv}")
    return heads, heads_kv


def _part(
    request: FlashForward, operands: Mapping[str, Adopted], counts: tuple[int, int], share: tuple[int, int]
) -> FlashForward:
    index, parts = share  # the part's number, and how many there are
    changed: dict[str, Any] = {}
    for axes, heads in ((_OF_Q, counts[0]), (_OF_K, counts[1])):
        each = heads // parts
        for name, axis in axes.items():
            if name not in operands:
                continue
            array: Any = operands[name].array
            if name == "bias" and array.ndim >= 3 and array.shape[axis] == 1:
                continue  # one bias for all heads
            extent = array.shape[axis] if array.ndim >= -axis else None
            expect(extent == heads, name, describe(array), f"must have {heads} heads on axis {axis}")
            changed[name] = np.ascontiguousarray(array.take(range(index * each, (index + 1) * each), axis=axis))
    if request.dropout_p:  # its random numbers depend on the number of the head
        changed["dropout_first_head"] = request.dropout_first_head + index * (counts[0] // parts)
        changed["dropout_heads"] = counts[0] if request.dropout_heads is None else request.dropout_heads
    return dataclasses.replace(request, **changed)


def _joined(answers: Sequence[AttentionOutput], operands: Mapping[str, Adopted]) -> AttentionOutput:
    out = np.concatenate([answer.out for answer in answers], axis=-2)
    lse = None if answers[0].lse is None else np.concatenate([answer.lse for answer in answers], axis=-2)
    return restored(AttentionOutput(out, lse), operands["q"])


def _joined_gradients(answers: Sequence[AttentionGradients], operands: Mapping[str, Adopted]) -> AttentionGradients:
    joined = [np.concatenate([answer[index] for answer in answers], axis=-2) for index in range(3)]
    dbias = dsinks = None
    if answers[0].dbias is not None:
        biases = [answer.dbias for answer in answers]
        if operands["bias"].array.shape[-3] == 1:
            kind = biases[0].dtype
            dbias = np.sum([bias.astype(np.float64) for bias in biases], axis=0).astype(kind)
        else:
            dbias = np.concatenate(biases, axis=-3)
    if answers[0].dsinks is not None:
        dsinks = np.concatenate([answer.dsinks for answer in answers], axis=-1)
    return restored(AttentionGradients(*(*joined, dbias, dsinks)), operands["q"])
