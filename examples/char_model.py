"""A tiny character transformer in NumPy: its loss, its gradients written out by hand, and AdamW.

It has an embedding and blocks of RMSNorm, grouped-query attention and a squared-ReLU MLP. The caller provides
attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["AdamW", "Array", "Attention", "AttentionGradient", "Model", "Settings", "Tokens"]

Array: TypeAlias = npt.NDArray[Any]
Tokens: TypeAlias = npt.NDArray[np.int64]

EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """context: characters of a training sequence. learning_rate: AdamW's highest, after a warm-up."""

    layers: int = 2
    width: int = 128
    heads: int = 4
    heads_kv: int = 2
    head_dim: int = 32
    context: int = 64
    batch: int = 16
    steps: int = 600
    learning_rate: float = 3e-3
    warmup: int = 20
    weight_decay: float = 0.01
    seed: int = 0


class AttentionGradient(NamedTuple):
    dq: Array
    dk: Array
    dv: Array


class Attention(Protocol):
    """Causal attention on (batch, seqlen, heads, head_dim), and its gradients."""

    async def forward(self, q: Array, k: Array, v: Array) -> tuple[Array, Array]: ...

    async def backward(
        self, dout: Array, q: Array, k: Array, v: Array, out: Array, lse: Array
    ) -> AttentionGradient: ...


@dataclass(slots=True)
class Block:
    """The values of one block's forward that backward reads. norms: see `normalise`."""

    x: Array
    h: Array
    q: Array
    k: Array
    v: Array
    out: Array
    lse: Array
    middle: Array
    g: Array
    up: Array


@dataclass(slots=True)
class Model:
    """The weights by name, all float32 (or float64, to check gradients), and the model's functions."""

    settings: Settings
    weights: dict[str, Array] = field(default_factory=dict)

    @classmethod
    def initialised(cls, settings: Settings, alphabet: int) -> Model:
        rng = np.random.default_rng(settings.seed)
        width, dim = settings.width, settings.head_dim
        shapes = {"embedding": (alphabet, width), "gain": (width,), "head": (width, alphabet)}
        for layer in range(settings.layers):
            shapes |= {
                f"{layer}.gain_attention": (width,),
                f"{layer}.q": (width, settings.heads * dim),
                f"{layer}.k": (width, settings.heads_kv * dim),
                f"{layer}.v": (width, settings.heads_kv * dim),
                f"{layer}.o": (settings.heads * dim, width),
                f"{layer}.gain_mlp": (width,),
                f"{layer}.up": (width, 4 * width),
                f"{layer}.down": (4 * width, width),
            }
        model = cls(settings)
        for name, shape in shapes.items():
            spread = 0.02 if name in ("embedding", "head") else shape[0] ** -0.5
            drawn = np.ones(shape) if "gain" in name else rng.normal(scale=spread, size=shape)
            model.weights[name] = drawn.astype(np.float32)
        return model

    async def loss(self, tokens: Tokens, attention: Attention) -> tuple[float, dict[str, Array]]:
        """The mean cross-entropy of predicting each next character, in nats, and its gradient with respect to each
        weight.
        """
        blocks: list[Block] = []
        x = self.weights["embedding"][tokens[:, :-1]]
        for layer in range(self.settings.layers):
            block, x = await self._block(layer, x, attention)
            blocks.append(block)
        last = normalise(x, self.weights["gain"])
        loss, dlogits = cross_entropy(last @ self.weights["head"], tokens[:, 1:])
        gradients = {"head": outer(last, dlogits)}
        dx, gradients["gain"] = normalise_backward(dlogits @ self.weights["head"].T, x, self.weights["gain"])
        for layer in reversed(range(self.settings.layers)):
            dx = await self._block_backward(layer, dx, blocks[layer], attention, gradients)
        gradients["embedding"] = np.zeros_like(self.weights["embedding"])
        np.add.at(gradients["embedding"], tokens[:, :-1], dx)
        return loss, gradients

    def project(self, layer: int, x: Array) -> tuple[Array, Array, Array, Array]:
        """(the normalised x, q, k, v) of a layer, the latter (batch, seqlen, heads, head_dim)."""
        h = normalise(x, self.weights[f"{layer}.gain_attention"])
        q, k, v = (self._heads(h @ self.weights[f"{layer}.{name}"]) for name in "qkv")
        return h, q, k, v

    def finish(self, layer: int, x: Array, out: Array) -> tuple[Array, Array, Array, Array]:
        """(x after attention, its normalised form, the MLP's activation, x after the block)."""
        middle = x + out.reshape(*x.shape[:-1], -1) @ self.weights[f"{layer}.o"]
        g = normalise(middle, self.weights[f"{layer}.gain_mlp"])
        up = np.maximum(g @ self.weights[f"{layer}.up"], 0)
        return middle, g, up, middle + np.square(up) @ self.weights[f"{layer}.down"]

    def logits(self, x: Array) -> Array:
        return normalise(x, self.weights["gain"]) @ self.weights["head"]

    def _heads(self, projected: Array) -> Array:
        return projected.reshape(*projected.shape[:-1], -1, self.settings.head_dim)

    async def _block(self, layer: int, x: Array, attention: Attention) -> tuple[Block, Array]:
        h, q, k, v = self.project(layer, x)
        out, lse = await attention.forward(q, k, v)
        middle, g, up, after = self.finish(layer, x, out)
        return Block(x, h, q, k, v, out, lse, middle, g, up), after

    async def _block_backward(
        self, layer: int, dx: Array, block: Block, attention: Attention, gradients: dict[str, Array]
    ) -> Array:
        """The gradient with respect to the block's input. Those of its weights go into ``gradients``."""
        weights = {name: self.weights[f"{layer}.{name}"] for name in ("q", "k", "v", "o", "up", "down")}
        found = {"down": outer(np.square(block.up), dx)}
        dup = 2 * block.up * (dx @ weights["down"].T)
        found["up"] = outer(block.g, dup)
        gain = self.weights[f"{layer}.gain_mlp"]
        dmiddle, found["gain_mlp"] = normalise_backward(dup @ weights["up"].T, block.middle, gain)
        dmiddle = dmiddle + dx
        found["o"] = outer(block.out.reshape(*dx.shape[:-1], -1), dmiddle)
        dout = self._heads(dmiddle @ weights["o"].T)
        inner = await attention.backward(dout, block.q, block.k, block.v, block.out, block.lse)
        dh = np.zeros_like(block.h)
        for name, gradient in zip("qkv", inner, strict=True):
            flat = gradient.reshape(*dx.shape[:-1], -1)
            found[name] = outer(block.h, flat)
            dh += flat @ weights[name].T
        gain = self.weights[f"{layer}.gain_attention"]
        before, found["gain_attention"] = normalise_backward(dh, block.x, gain)
        gradients |= {f"{layer}.{name}": gradient for name, gradient in found.items()}
        result: Array = dmiddle + before
        return result


def outer(inputs: Array, gradient: Array) -> Array:
    """The gradient of inputs @ W with respect to W: (in, out), summed over batch and rows."""
    product: Array = inputs.reshape(-1, inputs.shape[-1]).T @ gradient.reshape(-1, gradient.shape[-1])
    return product


def normalise(x: Array, gain: Array) -> Array:
    """RMSNorm (Zhang and Sennrich, arXiv 1910.07467) over the last axis."""
    normalised: Array = x * gain / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + EPSILON)
    return normalised


def normalise_backward(dy: Array, x: Array, gain: Array) -> tuple[Array, Array]:
    """(the gradient with respect to x, that with respect to the gain)."""
    scale = 1 / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + EPSILON)
    scaled = dy * gain
    dx = scale * (scaled - x * np.square(scale) * (scaled * x).mean(axis=-1, keepdims=True))
    return dx, (dy * x * scale).reshape(-1, x.shape[-1]).sum(axis=0)


def cross_entropy(logits: Array, targets: Tokens) -> tuple[float, Array]:
    """The mean over all targets, and its gradient with respect to the logits."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    total = np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    log_probabilities = shifted - total
    picked = np.take_along_axis(log_probabilities, targets[..., None], axis=-1)
    gradient = np.exp(log_probabilities)
    np.put_along_axis(gradient, targets[..., None], np.exp(picked) - 1, axis=-1)
    return -float(picked.mean()), gradient / targets.size


class AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with a linear warm-up and a cosine decay to a tenth."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._moments = {name: (np.zeros_like(w), np.zeros_like(w)) for name, w in model.weights.items()}
        self._step = 0

    def update(self, gradients: dict[str, Array]) -> None:
        settings = self._model.settings
        self._step += 1
        done = min(1.0, self._step / max(1, settings.steps))
        rate = settings.learning_rate * (0.1 + 0.45 * (1 + np.cos(np.pi * done)))
        rate *= min(1.0, self._step / max(1, settings.warmup))
        for name, weight in self._model.weights.items():
            first, second = self._moments[name]
            gradient = gradients[name]
            first += 0.1 * (gradient - first)
            second += 0.05 * (np.square(gradient) - second)
            corrected = first / (1 - 0.9**self._step), second / (1 - 0.95**self._step)
            weight -= rate * (corrected[0] / (np.sqrt(corrected[1]) + 1e-8) + settings.weight_decay * weight)
