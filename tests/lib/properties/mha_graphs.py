"""The operation graphs that compute the same as ``mha_forward`` and ``mha_backward``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum

from properties.problems import FP8, Array

import gpu_actors as ga

__all__ = ["MhaUid", "mha_backward_graph", "mha_forward_graph"]


class MhaUid(IntEnum):
    """The uids of the tensors of these graphs in `execute`."""

    Q = 1
    K = 2
    V = 3
    BIAS = 4
    OUT = 5
    STATS = 6
    DOUT = 7
    DQ = 11
    DK = 12
    DV = 13
    DBIAS = 14


def mha_forward_graph(
    params: ga.AttentionParams, arrays: Mapping[MhaUid, Array], *, return_stats: bool = False
) -> ga.OperationGraph:
    """softmax(mask(scale q k^T + bias)) v, with dropout. arrays: Q, K, V, and BIAS if there is one."""
    graph = ga.OperationGraph()
    inputs = _inputs(graph, arrays)
    out, stats = _attention(graph, params, inputs, return_stats)
    dtype = inputs[MhaUid.Q].dtype
    graph.output(out, uid=MhaUid.OUT, dtype="bfloat16" if dtype in FP8 else dtype, name="out")
    if stats is not None:
        graph.output(stats, uid=MhaUid.STATS, dtype="float32", name="stats")
    return graph


def mha_backward_graph(
    params: ga.AttentionParams, arrays: Mapping[MhaUid, Array], *, deterministic: bool = False
) -> ga.OperationGraph:
    """The gradients of `mha_forward_graph`'s out: of q, k and v, and of the bias if there is one.

    arrays: Q, K, V, OUT, STATS, DOUT, and BIAS if there is one.
    """
    graph = ga.OperationGraph()
    inputs = _inputs(graph, arrays)
    forward, dout = [_tensor(graph, uid, arrays[uid]) for uid in (MhaUid.OUT, MhaUid.STATS)], MhaUid.DOUT
    out, _ = _attention(graph, params, inputs, stats=False)
    gradients = graph.gradient(
        out,
        _tensor(graph, dout, arrays[dout]),
        tuple(inputs.values()),
        (forward[0], forward[1]),
        deterministic=deterministic,
    )
    for uid, gradient in zip(inputs, gradients, strict=True):
        graph.output(gradient, uid=MhaUid(uid + MhaUid.DQ - MhaUid.Q), dtype=inputs[uid].dtype)
    return graph


def _inputs(graph: ga.OperationGraph, arrays: Mapping[MhaUid, Array]) -> dict[MhaUid, ga.GraphTensor]:
    uids = (MhaUid.Q, MhaUid.K, MhaUid.V, MhaUid.BIAS)
    return {uid: _tensor(graph, uid, arrays[uid]) for uid in uids if uid in arrays}


def _tensor(graph: ga.OperationGraph, uid: MhaUid, array: Array) -> ga.GraphTensor:
    strides = tuple(step // array.itemsize for step in array.strides)
    return graph.tensor(uid=uid, dims=array.shape, dtype=array.dtype.name, strides=strides, name=uid.name.lower())


def _attention(
    graph: ga.OperationGraph, params: ga.AttentionParams, inputs: Mapping[MhaUid, ga.GraphTensor], stats: bool
) -> tuple[ga.GraphTensor, ga.GraphTensor | None]:
    q, k, v = (inputs[uid] for uid in (MhaUid.Q, MhaUid.K, MhaUid.V))
    scale = 1.0 / math.sqrt(params.head_dim) if params.scale is None else params.scale
    scores = graph.matmul(q, graph.transpose(k)) * float(scale)
    if MhaUid.BIAS in inputs:
        scores = scores + inputs[MhaUid.BIAS]
    scores = graph.mask(scores, params.mask, params.alignment)
    row_stats: ga.GraphTensor | None = None
    if stats:
        weights, row_stats = graph.softmax_with_stats(scores)
    else:
        weights = graph.softmax(scores)
    if params.dropout_p:
        weights = graph.dropout(weights, params.dropout_p, params.dropout_seed)
    return graph.matmul(weights, v), row_stats
