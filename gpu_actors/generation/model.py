"""Llama: a decoder without its attention, on rows of many sequences at once.

    tokens -> embed -> [ before_attention -> q, k, v ->  (attention)  -> after_attention ] x layers -> logits

Touvron et al., "LLaMA", arXiv 2302.13971, section 2.2: RMSNorm before each half of a layer, SwiGLU, rotary embedding.
All arithmetic is float32.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from gpu_actors.errors import InvalidRequest
from gpu_actors.generation.config import LlamaConfig
from gpu_actors.generation.weights import Matrix, Weights

__all__ = ["Heads", "Llama", "plain_logits", "rms_norm", "silu"]


class Heads(NamedTuple):
    """q (rows, heads, head_dim), k and v (rows, kv_heads, head_dim); q and k are not rotated yet."""

    q: Matrix
    k: Matrix
    v: Matrix


# A product of fewer multiplications is not split: passing half of it to another thread takes longer than it saves.
_WORTH_SPLITTING = 1 << 19


class Llama:
    """A model. It has no state between calls, and takes rows of any sequences in any order.

    threads: how many share each product, if BLAS itself is limited to one. BLAS's own threads wait by spinning: on busy
        cores a product by two of them takes several times as long as by one.
    """

    def __init__(self, config: LlamaConfig, weights: Weights, *, threads: int = 1) -> None:
        self.config = config
        self.weights = weights
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "llama") if threads > 1 else None

    def embed(self, tokens: NDArray[np.integer]) -> Matrix:
        """The embeddings of tokens, (rows, hidden). Raises `InvalidRequest` for a token that the vocabulary lacks."""
        if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.config.vocab:
            raise InvalidRequest("tokens", tokens, f"must be ids from 0 to {self.config.vocab - 1}")
        return np.asarray(self.weights.embedding[tokens])

    def before_attention(self, layer: int, x: Matrix) -> Heads:
        """The inputs of a layer's attention for the rows x (rows, hidden)."""
        config, weights = self.config, self.weights.layers[layer]
        normed = rms_norm(x, weights.attention_norm, config.norm_eps)
        rows, dim = len(x), config.head_dim
        q, k, v = self._products(normed, weights.q, weights.k, weights.v)
        return Heads(
            q.reshape(rows, config.heads, dim),
            k.reshape(rows, config.kv_heads, dim),
            v.reshape(rows, config.kv_heads, dim),
        )

    def after_attention(self, layer: int, x: Matrix, attended: Matrix) -> Matrix:
        """The layer's output. attended: (rows, heads, head_dim), the output of its attention."""
        weights = self.weights.layers[layer]
        x = x + self._products(attended.reshape(len(x), -1), weights.o)[0]
        normed = rms_norm(x, weights.mlp_norm, self.config.norm_eps)
        gate, up = self._products(normed, weights.gate, weights.up)
        return np.asarray(x + self._products(silu(gate) * up, weights.down)[0], np.float32)

    def logits(self, x: Matrix) -> Matrix:
        """The logits (rows, vocab) of the last layer's output."""
        return self._products(rms_norm(x, self.weights.norm, self.config.norm_eps), self.weights.head)[0]

    def _products(self, x: Matrix, *matrices: Matrix) -> list[Matrix]:
        """x times each matrix. Each thread computes a share of the columns."""
        if self._pool is None or len(x) * sum(matrix.size for matrix in matrices) < _WORTH_SPLITTING:
            return [np.asarray(x @ matrix) for matrix in matrices]
        outs = [np.empty((len(x), matrix.shape[1]), np.float32) for matrix in matrices]

        def share(index: int) -> None:
            for matrix, out in zip(matrices, outs, strict=True):
                columns = slice(*(matrix.shape[1] * at // self._threads for at in (index, index + 1)))
                np.matmul(x, matrix[:, columns], out=out[:, columns])

        others = [self._pool.submit(share, index) for index in range(1, self._threads)]
        share(0)
        for other in others:
            other.result()
        return outs


def rms_norm(x: Matrix, weight: Matrix, eps: float) -> Matrix:
    """RMSNorm of rows (Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467, equation 4)."""
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(mean + np.float32(eps)) * weight, np.float32)


def silu(x: Matrix) -> Matrix:
    """x times its sigmoid, without an overflow for large negative x."""
    return np.asarray(x * (0.5 * (1.0 + np.tanh(0.5 * x))), np.float32)


def plain_logits(model: Llama, tokens: NDArray[np.integer], dtype: DTypeLike = np.float32) -> Matrix:
    """The logits (rows, vocab) after each token of one sequence, all rows at once, without the service.

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
