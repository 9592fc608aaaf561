"""plain_logits: the whole model in NumPy alone, with no cache and no service, for comparison."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpu_actors.generation.model import Llama
from gpu_actors.generation.weights import Matrix

__all__ = ["plain_logits"]


def plain_logits(model: Llama, tokens: NDArray[np.integer], dtype: DTypeLike = np.float32) -> Matrix:
    """(rows, vocab): the logits after each token of one sequence, all rows at once.

    dtype: attention's operands and output are rounded to it, as in a cache of that dtype.
    """
    config = model.config
    angles = np.arange(len(tokens))[:, None] * np.array(config.inv_freq)
    x = model.embed(tokens)
    for layer in range(config.layers):
        q, k, v = (_round(heads, dtype) for heads in model.before_attention(layer, x))
        attended = _attention(_round(_rotate(q, angles), dtype), _round(_rotate(k, angles), dtype), v)
        x = model.after_attention(layer, x, _round(attended, dtype))
    return model.logits(x)


def _round(x: Any, dtype: DTypeLike) -> Matrix:
    return np.asarray(x, np.float32).astype(dtype).astype(np.float32)


def _rotate(x: Matrix, angles: Any) -> Any:
    """The rotary embedding: column i and column i + head_dim / 2 are a pair."""
    cos, sin = np.cos(angles)[:, None, :], np.sin(angles)[:, None, :]
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _attention(q: Matrix, k: Matrix, v: Matrix) -> Matrix:
    """softmax(q k^T / sqrt(dim)) v, each row over itself and the rows before it, a KV head for every group of heads."""
    rows, heads, dim = q.shape
    group = heads // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim)
    scores = np.where(np.tri(rows, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.asarray(np.einsum("hqk,khd->qhd", weights, v), np.float32)
