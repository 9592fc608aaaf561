"""The graphs of ``mha_forward`` and ``mha_backward``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from gpu_actors.arrays.device_array import element_strides
from gpu_actors.graph.graph import OperationGraph
from gpu_actors.graph.tensor import GraphTensor
from gpu_actors.kernels.support import ELEMENTS
from gpu_actors.mha import AttentionParams, Mask
from gpu_actors.problem import AttentionProblem
from gpu_actors.requests import FlashBackward, FlashForward
from gpu_actors.validation.fields import describe, expect

__all__ = ["MhaUid", "TensorLayout", "mha_backward_graph", "mha_forward_graph", "request_graph"]


class MhaUid(IntEnum):
    """What names the tensors of these graphs in `execute`."""

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

    layouts: of Q, K, V, and of BIAS where there is one; of OUT and STATS the strides, where they shall not be packed.
    Raises InvalidRequest where they do not agree.
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
    """The gradients of `mha_forward_graph`'s output: of q, k and v, and of the bias where there is one.

    layouts: of Q, K, V, OUT, STATS, DOUT, and of BIAS where there is one; of DQ, DK, DV and DBIAS the strides, where
    they shall not be packed.
    """
    graph = OperationGraph()
    inputs = {uid: _tensor(graph, uid, layouts[uid]) for uid in list(MhaUid)[:4] if uid in layouts}
    given = {uid: _tensor(graph, uid, layouts[uid]) for uid in (MhaUid.OUT, MhaUid.STATS, MhaUid.DOUT)}
    out, _ = _attention(graph, params, inputs, stats=False)
    forward = given[MhaUid.OUT], given[MhaUid.STATS]
    gradients = graph.gradient(out, given[MhaUid.DOUT], tuple(inputs.values()), forward, deterministic=deterministic)
    for uid, gradient in zip(inputs, gradients, strict=True):
        named = MhaUid(uid + MhaUid.DQ - MhaUid.Q)
        graph.output(gradient, uid=named, dtype=inputs[uid].dtype, strides=_strides(layouts, named))
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
    found: GraphTensor | None = None
    if stats:
        weights, found = graph.softmax_with_stats(scores)
    else:
        weights = graph.softmax(scores)
    if params.dropout_p:
        weights = graph.dropout(weights, params.dropout_p, params.dropout_seed)
    return graph.matmul(weights, v), found


def _strides(layouts: Mapping[MhaUid, TensorLayout], uid: MhaUid) -> tuple[int, ...] | None:
    return layouts[uid].strides if uid in layouts else None


def request_graph(request: FlashForward, problem: AttentionProblem) -> OperationGraph:
    """The graph of an adopted and validated request in FlashAttention's layout, whose axes change places.

    Raises `InvalidRequest` for a mask in place of a bias, and for a bias of one row, which a graph says by nodes.
    """
    if request.bias is not None:
        plain = problem.dbias and not problem.bias_row
        expect(
            plain, "bias", describe(request.bias), "must hold numbers, of all rows; flash_attn takes masks and one row"
        )
    params = AttentionParams(
        batch=problem.batch,
        seq_q=problem.seqlen_q,
        seq_kv=problem.seqlen_k,
        heads_q=problem.heads_q,
        heads_kv=problem.heads_kv,
        head_dim=problem.head_dim,
        mask=_mask_of(problem),
        scale=problem.softmax_scale,
        dropout_p=problem.dropout_p,
        alignment=problem.alignment,
    )
    arrays = {MhaUid.Q: request.q, MhaUid.K: request.k, MhaUid.V: request.v}
    layouts = {uid: _heads_first(array) for uid, array in arrays.items()}
    if request.bias is not None:
        layouts[MhaUid.BIAS] = _layout(request.bias)
    if isinstance(request, FlashBackward):
        layouts[MhaUid.OUT], layouts[MhaUid.DOUT] = _heads_first(request.out), _heads_first(request.dout)
        layouts[MhaUid.STATS] = _layout(request.lse[..., None])
        return mha_backward_graph(params, layouts, deterministic=problem.deterministic)
    return mha_forward_graph(params, layouts, return_stats=problem.return_lse)


def _mask_of(problem: AttentionProblem) -> Mask:
    left, right = problem.window_size
    if problem.causal:
        return Mask.causal() if left < 0 else Mask.causal_sliding_window(left + 1)
    return Mask.none() if left < 0 and right < 0 else Mask.sliding_window(left + 1)


def _heads_first(array: Any) -> TensorLayout:
    return _layout(array.transpose(0, 2, 1, 3))


def _layout(array: Any) -> TensorLayout:
    return TensorLayout(tuple(array.shape), array.dtype.name, element_strides(array))
