"""A tiny transformer in NumPy that decodes with one step of a KvCache for each token, on the mock device.

    python examples/model_step.py

Its weights are random, so its tokens mean nothing. The first step takes the whole prompt, later ones a token each.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import gpu_actors as ga

LAYERS, HEADS, HEAD_DIM, VOCABULARY, LONGEST = 2, 2, 16, 64, 64
WIDTH = HEADS * HEAD_DIM
PROMPT = (3, 14, 15, 9, 26)

Array = np.ndarray[Any, np.dtype[np.float32]]


class Model:
    """Attention and an MLP in each layer, over the sum of a token's and a position's embedding."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)

        def weights(*shape: int) -> Array:
            return np.asarray(rng.standard_normal(shape) / np.sqrt(shape[-2]), np.float32)

        self.tokens, self.places = weights(VOCABULARY, WIDTH), weights(LONGEST, WIDTH)
        self.qkv, self.out = weights(LAYERS, 3, WIDTH, WIDTH), weights(LAYERS, WIDTH, WIDTH)
        self.up, self.down = weights(LAYERS, WIDTH, 4 * WIDTH), weights(LAYERS, 4 * WIDTH, WIDTH)
        self.head = weights(WIDTH, VOCABULARY)

    def next_token(self, tokens: Sequence[int], first: int, attend: Callable[..., Array]) -> int:
        """The token after ``tokens``, whose first is at position ``first``.

        attend: returns the attention of a layer, from its number and q, k and v (1, rows, heads, head_dim).
        """
        rows = len(tokens)
        x = self.tokens[list(tokens)] + self.places[first : first + rows]
        for layer in range(LAYERS):
            q, k, v = (_normalised(x) @ self.qkv[layer]).reshape(3, 1, rows, HEADS, HEAD_DIM)
            x = x + attend(layer, q, k, v).reshape(rows, WIDTH) @ self.out[layer]
            x = x + np.maximum(_normalised(x) @ self.up[layer], 0) @ self.down[layer]
        return int(np.argmax(_normalised(x[-1]) @ self.head))


def _normalised(x: Array) -> Array:
    scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6))
    return np.asarray(x / scale, np.float32)


async def decode(cache: ga.KvCache, model: Model, prompt: Sequence[int], count: int) -> list[int]:
    """The ``count`` most likely tokens after a prompt."""
    seq = await cache.create()
    tokens = list(prompt)
    for _ in range(count):
        first = cache.length(seq)
        new = tokens[first:]
        # No request on seq is awaited within the block, because it would wait for the end of the step.
        async with await cache.step([seq], heads_q=HEADS, rows=len(new)) as step:
            token = model.next_token(new, first, step.attend)
        tokens.append(token)
    await cache.free(seq)
    return tokens[len(prompt) :]


async def main() -> None:
    async with (
        ga.open_context("mock") as ctx,
        ctx.kv_cache(
            num_blocks=8, page_size=16, kv_heads=HEADS, head_dim=HEAD_DIM, dtype="float32", layers=LAYERS
        ) as cache,
    ):
        tokens = await decode(cache, Model(), PROMPT, 12)
        sys.stdout.write(" ".join(map(str, tokens)) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
