"""Rows, keys and heads with positions in a larger problem: what is dropped, which kernels, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gpu_actors as ga

ROWS, HEADS, KV_HEADS, DIM = 24, 4, 2, 8


def operands() -> list[np.ndarray]:
    """q, k, v and dout."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, ROWS, heads, DIM)) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


def places(*steps: tuple[int, int]) -> np.ndarray:
    return np.array(steps, np.int32)


def test_shards_of_heads_drop_what_the_whole_drops(ctx: ga.GpuContext) -> None:
    q, k, v, _ = operands()
    options: dict[str, Any] = {"dropout_p": 0.4, "dropout_seed": 11}
    whole = ctx.flash_attn.forward(q, k, v, **options).result(60)
    for shard in range(2):
        heads, kv_heads = slice(2 * shard, 2 * shard + 2), slice(shard, shard + 1)
        part = ctx.flash_attn.forward(
            q[:, :, heads], k[:, :, kv_heads], v[:, :, kv_heads],
            dropout_first_head=2 * shard, dropout_heads=HEADS, **options,
        ).result(60)  # fmt: skip
        np.testing.assert_allclose(part.out, whole.out[:, :, heads], atol=1e-12)


def test_positions_choose_kernels_that_know_them(ctx: ga.GpuContext) -> None:
    q, k, v = (x.astype(np.float16)[..., [0] * 64] for x in operands()[:3])
    plain = ctx.flash_attn.inspect_key(ga.FlashForward(q, k, v, pack_gqa=False))  # no positions are packed
    placed = ctx.flash_attn.inspect_key(ga.FlashForward(q, k, v, q_positions=places((0, 1), (0, 1))))
    assert (plain.kernel, plain.positions) == ("forward_sm90", False)
    assert (placed.kernel, placed.positions) == ("forward_sm90", True)
    assert ctx.flash_attn.inspect_key(ga.FlashForward(q, k, v, dropout_heads=8, pack_gqa=False)) == plain


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"q_positions": np.zeros(3, np.int32)}, "q_positions"),
    "dtype": ({"k_positions": np.zeros(2, np.int64)}, "k_positions"),
    "before 0": ({"q_positions": places((0, 1), (-1, 1))}, "q_positions"),
    "no step": ({"k_positions": places((0, 1), (0, 0))}, "k_positions"),
    "too far": ({"k_positions": places((0, 1), ((1 << 30) - 24 + 1, 1))}, "k_positions"),
    "too far by steps": ({"q_positions": places((0, 1 << 26), (0, 1))}, "q_positions"),
    "alignment": ({"q_positions": places((0, 1), (0, 1)), "alignment": "top_left"}, "alignment"),
    "head": ({"dropout_first_head": -1}, "dropout_first_head"),
    "heads": ({"dropout_heads": 0}, "dropout_heads"),
    "no room for heads": ({"dropout_first_head": 5, "dropout_heads": 8}, "dropout_first_head"),
    "no heads": ({"dropout_first_head": 1}, "dropout_first_head"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_refusal_names_the_argument(ctx: ga.GpuContext, name: str) -> None:
    q, k, v, dout = operands()
    options, field = BAD[name]
    for reply in (
        ctx.flash_attn.forward(q, k, v, dropout_p=0.5, **options),
        ctx.flash_attn.backward(dout, q, k, v, q, np.zeros((2, HEADS, ROWS), np.float32), dropout_p=0.5, **options),
    ):
        with pytest.raises(ga.InvalidRequest) as caught:
            reply.result(60)
        assert caught.value.field == field
