"""What tests of graphs share: a small attention, its arrays and its formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import gpu_actors as ga

Q, K, V, OUT, STATS = 1, 2, 3, 4, 5
DIMS = (2, 3, 24, 16)


def arrays_of(seed: int = 0, dtype: Any = np.float32) -> dict[int, Any]:
    rng = np.random.default_rng(seed)
    return {uid: rng.standard_normal(DIMS).astype(dtype) for uid in (Q, K, V)}


def unpacked(array: Any, order: tuple[int, ...]) -> Any:
    """The same array with its axes in another order in memory."""
    return np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))


def attention(
    strides: Mapping[int, tuple[int, ...]] | None = None, out_strides: tuple[int, ...] | None = None
) -> ga.OperationGraph:
    graph = ga.OperationGraph()
    given = strides or {}
    q, k, v = (graph.tensor(uid=uid, dims=DIMS, dtype="float32", strides=given.get(uid)) for uid in (Q, K, V))
    weights = graph.softmax(graph.matmul(q, graph.transpose(k)) * 0.25)
    graph.output(graph.matmul(weights, v), uid=OUT, strides=out_strides)
    return graph


def formula(arrays: Mapping[int, Any], scale: float = 0.25, visible: Any = True) -> Any:
    q, k, v = (arrays[uid].astype(np.float64) for uid in (Q, K, V))
    scores = np.where(visible, scale * q @ k.swapaxes(-1, -2), -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights @ v / weights.sum(axis=-1, keepdims=True)
