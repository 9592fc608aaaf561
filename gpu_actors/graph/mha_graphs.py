"""The graphs of ``mha_forward`` and ``mha_backward``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

from gpu_actors.attention.mha import AttentionParams
from gpu_actors.graph.graph import OperationGraph
from gpu_actors.graph.tensor import GraphTensor
from gpu_actors.kernels.support import ELEMENTS

__all__ = ["MhaUid", "TensorLayout", "mha_backward_graph", "mha_forward_graph"]


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


class TensorLayout(NamedTuple):
    """dims, strides in elements (None: without gaps) and dtype of an array."""

    dims: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None


def mha_forward_graph(
    params: AttentionParams,
    layouts: Mapping[MhaUid, TensorLayout],
    *,
    return_stats: bool = False,
) -> OperationGraph:
    """softmax(mask(scale q k^T + bias)) v, with dropout.

    layouts: of Q, K, V, and of BIAS if there is one. For OUT and STATS the strides, if they are not packed.
    Raises InvalidRequest if they do not agree.
    """
    graph = OperationGraph()
    inputs = {
        uid: _tensor(graph, uid, layouts[uid]) for uid in (MhaUid.Q, MhaUid.K, MhaUid.V, MhaUid.BIAS) if uid in layouts
    }
    out, stats = _attention(graph, params, inputs, return_stats)
    dtype = ELEMENTS[inputs[MhaUid.Q].dtype].out
    graph.output(out, uid=MhaUid.OUT, dtype=dtype, strides=_strides(layouts, MhaUid.OUT), name="out")
    if stats is not None:
        graph.output(stats, uid=MhaUid.STATS, dtype="float32", strides=_strides(layouts, MhaUid.STATS), name="stats")
    return graph


def mha_backward_graph(
    params: AttentionParams, layouts: Mapping[MhaUid, TensorLayout], *, deterministic: bool = False
) -> OperationGraph:
    """The gradients of `mha_forward_graph`'s output: of q, k and v, and of the bias if there is one.

    layouts: of Q, K, V, OUT, STATS, DOUT, and of BIAS if there is one. For DQ, DK, DV and DBIAS the strides, if they
        are not packed.
    """
    graph = OperationGraph()
    inputs = {uid: _tensor(graph, uid, layouts[uid]) for uid in list(MhaUid)[:4] if uid in layouts}
    saved = {uid: _tensor(graph, uid, layouts[uid]) for uid in (MhaUid.OUT, MhaUid.STATS, MhaUid.DOUT)}
    out, _ = _attention(graph, params, inputs, stats=False)
    forward = saved[MhaUid.OUT], saved[MhaUid.STATS]
    gradients = graph.gradient(out, saved[MhaUid.DOUT], tuple(inputs.values()), forward, deterministic=deterministic)
    for uid, gradient in zip(inputs, gradients, strict=True):
        gradient_uid = MhaUid(uid + MhaUid.DQ - MhaUid.Q)
        graph.output(gradient, uid=gradient_uid, dtype=inputs[uid].dtype, strides=_strides(layouts, gradient_uid))
    return graph


def _tensor(graph: OperationGraph, uid: MhaUid, layout: TensorLayout) -> GraphTensor:
    return graph.tensor(
        uid=int(uid), dims=layout.dims, dtype=layout.dtype, strides=layout.strides, name=uid.name.lower()
    )


def _attention(
    graph: OperationGraph, params: AttentionParams, inputs: Mapping[MhaUid, GraphTensor], stats: bool
) -> tuple[GraphTensor, GraphTensor | None]:
    q, k, v = (inputs[uid] for uid in (MhaUid.Q, MhaUid.K, MhaUid.V))
    scale = 1.0 / math.sqrt(params.head_dim) if params.scale is None else params.scale
    scores = graph.matmul(q, graph.transpose(k)) * float(scale)
    if MhaUid.BIAS in inputs:
        scores = scores + inputs[MhaUid.BIAS]
    scores = graph.mask(scores, params.mask, params.alignment)
    row_stats: GraphTensor | None = None
    if stats:
        weights, row_stats = graph.softmax_with_stats(scores)
    else:
        weights = graph.softmax(scores)
    if params.dropout_p:
        weights = graph.dropout(weights, params.dropout_p, params.dropout_seed)
    return graph.matmul(weights, v), row_stats


def _strides(layouts: Mapping[MhaUid, TensorLayout], uid: MhaUid) -> tuple[int, ...] | None:
    return layouts[uid].strides if uid in layouts else None
