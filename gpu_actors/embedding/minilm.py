"""The forward pass of a BERT sentence encoder, such as all-MiniLM-L6-v2. The caller computes attention.

    x = embeddings(batch)
    for layer in model.layers:  q, k, v = layer.heads(x)  ->  attention  ->  x = layer.finish(x, attended)
    vectors = model.head(x, batch)

All functions are plain NumPy in float32 and block, so `gpu_actors.embedding.embedder` runs them on threads.
Texts are packed row after row with no padding, so T below is the number of tokens of all texts of a batch
together.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpu_actors.embedding.head import Head, load_head
from gpu_actors.embedding.layers import Floats, LayerNorm, Linear, gelu_inplace
from gpu_actors.embedding.tokens import TokenBatch
from gpu_actors.embedding.weights import ModelConfig, load_config, load_tensors
from gpu_actors.model_files import Tensors

__all__ = ["EncoderLayer", "MiniLM"]


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
        """Compute the rest of the block. x: (T, hidden), attended: (T, heads, head_dim); returns (T, hidden)."""
        y = self.output(attended.reshape(x.shape))
        y += x
        self.attention_norm.inplace(y)
        z = self.down(gelu_inplace(self.up(y)))
        z += y
        return self.feedforward_norm.inplace(z)


@dataclass(frozen=True, slots=True)
class MiniLM:
    """The encoder's weights, ready to multiply. All methods block. Any thread may call them."""

    config: ModelConfig
    words: Floats
    positions: Floats
    embedding_norm: LayerNorm
    layers: tuple[EncoderLayer, ...]
    head: Head

    @classmethod
    def load(cls, folder: Path) -> MiniLM:
        """Read a folder's config.json, model.safetensors and, if there is one, modules.json with its folders.

        Raises `InvalidRequest` for a broken file, `Unsupported` for a model that is not computed here.
        """
        config = load_config(folder)
        tensors = load_tensors(folder)
        hidden = config.hidden
        # Every token has type 0 here, so the row of this type is added to the position table once.
        types = tensors.take("embeddings.token_type_embeddings.weight", (None, hidden))
        return cls(
            config=config,
            words=tensors.take("embeddings.word_embeddings.weight", (config.vocab, hidden)),
            positions=tensors.take("embeddings.position_embeddings.weight", (config.positions, hidden)) + types[0],
            embedding_norm=LayerNorm.read(tensors, "embeddings.LayerNorm", hidden, config.layer_norm_eps),
            layers=tuple(_read_layer(tensors, config, index) for index in range(config.layers)),
            head=load_head(folder, hidden),
        )

    def embeddings(self, batch: TokenBatch) -> Floats:
        """The input rows (T, hidden) of a batch: word, position and type embedding, normalised."""
        x: Floats = self.words[batch.ids]
        x += self.positions[batch.positions]
        return self.embedding_norm.inplace(x)


def _read_layer(tensors: Tensors, config: ModelConfig, index: int) -> EncoderLayer:
    prefix = f"encoder.layer.{index}"
    hidden, intermediate = config.hidden, config.intermediate
    return EncoderLayer(
        query=Linear.read(tensors, f"{prefix}.attention.self.query", hidden, hidden),
        key=Linear.read(tensors, f"{prefix}.attention.self.key", hidden, hidden),
        value=Linear.read(tensors, f"{prefix}.attention.self.value", hidden, hidden),
        output=Linear.read(tensors, f"{prefix}.attention.output.dense", hidden, hidden),
        attention_norm=LayerNorm.read(tensors, f"{prefix}.attention.output.LayerNorm", hidden, config.layer_norm_eps),
        up=Linear.read(tensors, f"{prefix}.intermediate.dense", intermediate, hidden),
        down=Linear.read(tensors, f"{prefix}.output.dense", hidden, intermediate),
        feedforward_norm=LayerNorm.read(tensors, f"{prefix}.output.LayerNorm", hidden, config.layer_norm_eps),
        head_count=config.heads,
    )
