"""Turns dense batches of padded sequences (``seqused_q`` or ``seqused_k``) into varlen batches, without a copy.

A sequence b of the dense batch becomes three packed ones, so that each row and each key belongs to one of them:

    sequence     3b                3b + 1             3b + 2
    rows         those that count  those of padding   none
    keys         those that count  none               those of padding

Padding rows see no key, and no row sees padding keys. So outputs and gradients of padding are 0, and its contents do
not matter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from gpu_actors.arrays.device_array import DeviceArray
from gpu_actors.attention.requests import FlashBackward, FlashForward, array_fields
from gpu_actors.devices.interface import Outputs
from gpu_actors.errors import Unsupported
from gpu_actors.fields import describe, expect, optional_array
from gpu_actors.planning.merging import ends_of
from gpu_actors.runtime.completion import Finish
from gpu_actors.validation.forward import backward_problem, forward_problem
from gpu_actors.values import show

__all__ = ["to_dense_answer", "to_varlen"]

Request = TypeVar("Request", bound=FlashForward)

_PARTS = 3
_ROWS, _KEYS = ("q", "out", "dout"), ("k", "v")
_PLACES, _FACTORS = "_positions", ("_descale", "_slopes")  # fields per sequence; factors only if they have two axes


def to_varlen(request: Request) -> Request:
    """Turn an adopted request with ``seqused_q`` or ``seqused_k`` into one with cu_seqlens.

    A bias that the sequences do not share is copied, because each packed sequence has a matrix. The matrices of padding
    are not read.
    """
    for side in "qk":
        ends, field = getattr(request, f"cu_seqlens_{side}"), f"seqused_{side}"
        used = getattr(request, field)
        reason = "goes with dense batches only: cu_seqlens say where packed sequences end"
        expect(ends is None or used is None, field, None if used is None else describe(used), reason)
    if request.block_mask is not None:
        reason = "lists of blocks are not cut where padding is: give packed sequences and cu_seqlens"
        raise Unsupported("block_mask", show(request.block_mask), reason, "cu_seqlens_q")
    dense = dataclasses.replace(request, seqused_q=None, seqused_k=None)
    problem = backward_problem(dense) if isinstance(dense, FlashBackward) else forward_problem(dense)
    rows = _used("seqused_q", request.seqused_q, problem.batch, problem.seqlen_q)
    keys = _used("seqused_k", request.seqused_k, problem.batch, problem.seqlen_k)
    spare_rows, spare_keys, none = problem.seqlen_q - rows, problem.seqlen_k - keys, np.zeros_like(rows)
    changes: dict[str, Any] = {
        "cu_seqlens_q": ends_of(np.stack((rows, spare_rows, none), axis=1).ravel()),
        "cu_seqlens_k": ends_of(np.stack((keys, none, spare_keys), axis=1).ravel()),
        "max_seqlen_q": problem.seqlen_q,
        "max_seqlen_k": problem.seqlen_k,
    }
    for name in (*_ROWS, *_KEYS):
        if (array := getattr(dense, name, None)) is not None:
            changes[name] = _flat(name, array, writes=name == "out" and not isinstance(dense, FlashBackward))
    kind: type = type(dense)
    for name in array_fields(kind):
        array = getattr(dense, name)
        if array is None or not (name.endswith(_PLACES) or (name.endswith(_FACTORS) and array.ndim == 2)):
            continue
        changes[name] = _each(array, name)
        if name.endswith(_PLACES):
            if array.ndim == 1:
                changes[name] = np.stack([changes[name], np.ones_like(changes[name])], axis=1)
            for part in range(1, _PARTS):  # padding has position 0, which is always valid
                changes[name][part::_PARTS] = (0, 1)
    if dense.bias is not None and len(dense.bias) > 1:
        changes["bias"] = _each(dense.bias, "bias")
    if isinstance(dense, FlashBackward):
        # (batch, heads, rows) as (heads, batch * rows)
        changes["lse"] = _flat("lse", dense.lse.transpose(0, 2, 1)).transpose(1, 0)
        if dense.sinks is not None:
            # A padding row sees only its sink, and adds 0 times the padding's contents to the sink's gradient.
            counts = (np.arange(problem.seqlen_q) < rows[:, None]).reshape(-1)
            for name, counted in (("dout", counts[:, None, None]), ("out", counts[:, None, None]), ("lse", counts)):
                if isinstance(array := changes[name], np.ndarray):
                    changes[name] = np.where(counted, array, array.dtype.type(0))
    return dataclasses.replace(dense, **changes)


def to_dense_answer(request: FlashForward, finish: Finish) -> Finish:
    lengths = {"out": request.q, "dq": request.q, "dk": request.k, "dv": request.v}
    return functools.partial(_answer, len(request.q), {name: array.shape[1] for name, array in lengths.items()}, finish)


def _answer(batch: int, lengths: dict[str, int], finish: Finish, outputs: Outputs) -> Sequence[Any]:
    arrays = dict(outputs)
    for name, length in lengths.items():
        if arrays.get(name) is not None:
            arrays[name] = _cut(arrays[name], 0, batch, length)
    if arrays.get("lse") is not None:
        lse = _cut(arrays["lse"], 1, batch, lengths["out"])
        arrays["lse"] = lse.transpose(1, 0, 2)
    if (dbias := arrays.get("dbias")) is not None and len(dbias) > 1:
        arrays["dbias"] = _cut(dbias, 0, batch, _PARTS)[:, 0]
    return finish(arrays)


def _used(field: str, used: Any, batch: int, length: int) -> Any:
    """The rows or keys of each sequence that count, int64 (batch,)."""
    if used is None:
        return np.full(batch, length, np.int64)
    optional_array(field, used, ((batch,),), ("int32",))
    expect(isinstance(used, np.ndarray), field, describe(used), "must lie on the host, where sequences are cut")
    least, most = int(used.min(initial=0)), int(used.max(initial=0))
    expect(least >= 0, field, least, "must not be negative")
    expect(most <= length, field, most, f"must be at most the rows that a sequence has, {length}")
    return used.astype(np.int64)


def _each(array: Any, field: str) -> Any:
    expect(isinstance(array, np.ndarray), field, describe(array), "must lie on the host beside seqused_q or seqused_k")
    return np.repeat(array, _PARTS, axis=0)


def _flat(field: str, array: Any, writes: bool = False) -> Any:
    batch, length, *rest = array.shape
    outer, row = array.strides[:2]
    follows = batch <= 1 or length <= 1 or outer == length * row
    if isinstance(array, np.ndarray) and not (writes and not follows):
        return array.reshape(batch * length, *rest)
    reason = "must have sequences that follow each other without gaps beside seqused_q or seqused_k"
    expect(follows, field, f"{describe(array)} of strides {array.strides}", reason)
    return array.packed()


def _cut(array: Any, axis: int, batch: int, length: int) -> Any:
    shape = (*array.shape[:axis], batch, length, *array.shape[axis + 1 :])
    if not isinstance(array, DeviceArray):
        return array.reshape(shape)
    row = array.strides[axis]
    strides = (*array.strides[:axis], length * row, *array.strides[axis:])
    return dataclasses.replace(array, shape=shape, strides=strides, source=None)
