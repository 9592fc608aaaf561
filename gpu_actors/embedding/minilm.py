"""The forward pass of a BERT sentence encoder (all-MiniLM-L6-v2); attention is the caller's.

    x = embeddings(batch)
    for layer in model.layers:  q, k, v = layer.heads(x)  ->  attention  ->  x = layer.finish(x, attended)
    vectors = mean_pool(x, batch)

Everything here is plain NumPy in float32 and blocks; `gpu_actors.embedding.embedder` runs it on threads.
Texts are packed row after row with no padding, so T below is the number of tokens of all texts of a batch
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gpu_actors.embedding.gelu import gelu_inplace
from gpu_actors.embedding.tokens import TokenBatch
from gpu_actors.embedding.weights import ModelConfig, load_config, load_tensors
from gpu_actors.errors import InvalidRequest

__all__ = ["EncoderLayer", "LayerNorm", "Linear", "MiniLM", "mean_pool"]

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b. weight: (out, in), bias: (out,)."""

    weight: Floats
    bias: Floats

    def __call__(self, x: Floats) -> Floats:
        y: Floats = x @ self.weight.T
        y += self.bias
        return y


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Layer normalisation over the last axis, in place (Ba, Kiros and Hinton 2016)."""

    weight: Floats
    bias: Floats
    eps: float

    def inplace(self, x: Floats) -> Floats:
        x -= x.mean(axis=-1, keepdims=True)
        variance = np.einsum("td,td->t", x, x) / np.float32(x.shape[-1])
        x *= (1.0 / np.sqrt(variance + np.float32(self.eps)))[:, None]
        x *= self.weight
        x += self.bias
        return x


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One post-norm transformer block (Devlin et al. 2018)."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    attention_norm: LayerNorm
    up: Linear
    down: Linear
    feedforward_norm: LayerNorm
    head_count: int

    def heads(self, x: Floats) -> tuple[Floats, Floats, Floats]:
        """q, k, v, each (T, heads, head_dim) and contiguous, from x (T, hidden)."""
        q, k, v = (linear(x).reshape(len(x), self.head_count, -1) for linear in (self.query, self.key, self.value))
        return q, k, v

    def finish(self, x: Floats, attended: Floats) -> Floats:
        """The rest of the block. x: (T, hidden), attended: (T, heads, head_dim); returns (T, hidden)."""
        y = self.output(attended.reshape(x.shape))
        y += x
        self.attention_norm.inplace(y)
        z = self.down(gelu_inplace(self.up(y)))
        z += y
        return self.feedforward_norm.inplace(z)


@dataclass(frozen=True, slots=True)
class MiniLM:
    """The encoder's weights, ready to multiply. All methods block; any thread may call them."""

    config: ModelConfig
    words: Floats
    positions: Floats
    embedding_norm: LayerNorm
    layers: tuple[EncoderLayer, ...]

    @classmethod
    def load(cls, folder: Path) -> MiniLM:
        """Read config.json and model.safetensors of ``folder``. Raises `InvalidRequest` or `Unsupported`."""
        config = load_config(folder)
        reader = _Reader(load_tensors(folder), folder, config.layer_norm_eps)
        hidden = config.hidden
        # Every token is of type 0 here, so that row is added to the position table once.
        types = reader.take("embeddings.token_type_embeddings.weight", (None, hidden))
        return cls(
            config=config,
            words=reader.take("embeddings.word_embeddings.weight", (config.vocab, hidden)),
            positions=reader.take("embeddings.position_embeddings.weight", (config.positions, hidden)) + types[0],
            embedding_norm=reader.norm("embeddings.LayerNorm", hidden),
            layers=tuple(_read_layer(reader, config, index) for index in range(config.layers)),
        )

    def embeddings(self, batch: TokenBatch) -> Floats:
        """The input rows (T, hidden) of a batch: word, position and type embedding, normalised."""
        x: Floats = self.words[batch.ids]
        x += self.positions[batch.positions]
        return self.embedding_norm.inplace(x)


def mean_pool(x: Floats, batch: TokenBatch) -> Floats:
    """Unit rows (texts, hidden): the mean of each text's rows of x (T, hidden), L2-normalised."""
    sums = np.add.reduceat(x, batch.cu_seqlens[:-1], axis=0)
    lengths = np.diff(batch.cu_seqlens).astype(np.float32)
    means: Floats = np.divide(sums, lengths[:, None], dtype=np.float32)
    norms = np.sqrt(np.einsum("nd,nd->n", means, means))
    means /= np.maximum(norms, np.float32(1e-12))[:, None]
    return means


@dataclass(frozen=True, slots=True)
class _Reader:
    tensors: Mapping[str, Floats]
    folder: Path
    eps: float

    def take(self, name: str, shape: tuple[int | None, ...]) -> Floats:
        found = self.tensors.get(name)
        if found is None:
            raise InvalidRequest("model", str(self.folder), f"model.safetensors lacks the tensor {name}")
        if len(found.shape) != len(shape) or any(w not in (None, g) for w, g in zip(shape, found.shape, strict=True)):
            reason = f"the tensor {name} has shape {found.shape} where config.json asks for {shape}"
            raise InvalidRequest("model", str(self.folder), reason)
        return found

    def linear(self, name: str, out: int, into: int) -> Linear:
        return Linear(self.take(f"{name}.weight", (out, into)), self.take(f"{name}.bias", (out,)))

    def norm(self, name: str, size: int) -> LayerNorm:
        return LayerNorm(self.take(f"{name}.weight", (size,)), self.take(f"{name}.bias", (size,)), self.eps)


def _read_layer(reader: _Reader, config: ModelConfig, index: int) -> EncoderLayer:
    prefix = f"encoder.layer.{index}"
    hidden, intermediate = config.hidden, config.intermediate
    return EncoderLayer(
        query=reader.linear(f"{prefix}.attention.self.query", hidden, hidden),
        key=reader.linear(f"{prefix}.attention.self.key", hidden, hidden),
        value=reader.linear(f"{prefix}.attention.self.value", hidden, hidden),
        output=reader.linear(f"{prefix}.attention.output.dense", hidden, hidden),
        attention_norm=reader.norm(f"{prefix}.attention.output.LayerNorm", hidden),
        up=reader.linear(f"{prefix}.intermediate.dense", intermediate, hidden),
        down=reader.linear(f"{prefix}.output.dense", hidden, intermediate),
        feedforward_norm=reader.norm(f"{prefix}.output.LayerNorm", hidden),
        head_count=config.heads,
    )
