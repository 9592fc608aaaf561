"""Rows for caches whose layers differ."""

from __future__ import annotations

from typing import Any

import numpy as np
from inside.testing import cast

import gpu_actors as ga

__all__ = ["FP8", "HEADS_Q", "LATENT", "NARROW", "OPTIONS", "WIDE", "LayerRows", "together"]

HEADS_Q = 4
WIDE = ga.KvLayer(kv_heads=2, head_dim=16)
NARROW = ga.KvLayer(kv_heads=1, head_dim=32, head_dim_v=8, num_blocks=12)
LATENT = ga.KvLayer(kv_heads=1, head_dim=32, latent_dim=24, num_blocks=9)
FP8 = ga.KvLayer(
    kv_heads=2,
    head_dim=16,
    dtype="float8_e4m3fn",
    k_descale=np.array([0.05, 0.02], np.float32),
    v_descale=np.array([0.1, 0.1], np.float32),
)
OPTIONS: dict[str, Any] = {"softmax_scale": 0.2}


class LayerRows:
    """Draws rows of each layer. dtype: of all arrays."""

    def __init__(self, layers: list[ga.KvLayer], dtype: str, seed: int = 1) -> None:
        self.layers, self.dtype = layers, dtype
        self.rng = np.random.default_rng(seed)

    def draw(self, *shape: int) -> np.ndarray:
        drawn: np.ndarray = cast(self.rng.standard_normal(shape), self.dtype)
        return drawn

    def new(self, layer: int, *shape: int) -> dict[str, np.ndarray]:
        """Rows of one layer, by their names in requests."""
        spec = self.layers[layer]
        heads, dim, latent = spec.kv_heads or 0, spec.head_dim or 0, spec.latent_dim
        sides = {"c_kv": latent, "k_pe": dim - latent} if latent else {"k": dim, "v": spec.head_dim_v or dim}
        return {name: self.draw(*shape, heads, width) for name, width in sides.items()}

    def of_all(self, *shape: int) -> dict[str, list[np.ndarray | None]]:
        """Rows of all layers, as `AppendRows` takes them."""
        return together([self.new(layer, *shape) for layer in range(len(self.layers))])

    def q(self, layer: int, *shape: int) -> np.ndarray:
        return self.draw(*shape, HEADS_Q, self.layers[layer].head_dim or 0)


def together(rows: list[dict[str, np.ndarray]]) -> dict[str, list[np.ndarray | None]]:
    """The rows of each layer as `AppendRows` takes them."""
    names = dict.fromkeys(name for each in rows for name in each)
    return {name: [each.get(name) for each in rows] for name in names}
