"""Rows, keys and heads that stand in a larger problem: shards give what the whole gives, whatever the mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gpu_actors as ga
from gpu_actors.partial import Partial, merge
from gpu_actors.reference import attention_backward, attention_forward

ROWS, HEADS, KV_HEADS, DIM, SHARDS = 24, 4, 2, 8, 3
SLOPES = np.array([0.3, 0.1, 0.6, 0.2], np.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (5, 3)},
    "causal window": {"causal": True, "window_size": (7, -1)},
    "left window": {"window_size": (4, -1)},
    "right window": {"window_size": (-1, 2)},
    "sink tokens": {"causal": True, "window_size": (3, 0), "sink_tokens": 10},
    "sink tokens, window": {"window_size": (2, 2), "sink_tokens": 5},
    "alibi": {"alibi_slopes": SLOPES},
    "softcap": {"causal": True, "softcap": 2.0},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 11},
    "all": {
        "causal": True, "window_size": (9, 0), "sink_tokens": 3, "alibi_slopes": SLOPES, "dropout_p": 0.25,
        "dropout_seed": 3, "softcap": 3.0,
    },
}  # fmt: skip


def contiguous(shard: int) -> tuple[slice, tuple[int, int]]:
    size = ROWS // SHARDS
    return slice(shard * size, (shard + 1) * size), (shard * size, 1)


def interleaved(shard: int) -> tuple[slice, tuple[int, int]]:
    return slice(shard, None, SHARDS), (shard, SHARDS)


CUTS = {"contiguous": contiguous, "interleaved": interleaved}


def operands() -> list[np.ndarray]:
    """q, k, v and dout."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, ROWS, heads, DIM)) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


def places(*steps: tuple[int, int]) -> np.ndarray:
    return np.array(steps, np.int32)


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx
        assert ctx.flash_attn.restarts == 0


@pytest.mark.parametrize("key_cut", CUTS)
@pytest.mark.parametrize("row_cut", CUTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_shards_of_rows_and_keys_give_the_whole_and_its_gradients(name: str, row_cut: str, key_cut: str) -> None:
    options = OPTIONS[name]
    q, k, v, dout = operands()
    whole = attention_forward(q, k, v, **options)
    wanted = attention_backward(dout, q, k, v, **options)
    dq, dk, dv = (np.zeros_like(array) for array in (q, k, v))
    for row_shard in range(SHARDS):
        rows, row_steps = CUTS[row_cut](row_shard)
        partials = []
        for key_shard in range(SHARDS):
            keys, key_steps = CUTS[key_cut](key_shard)
            at = {"q_positions": places(row_steps, row_steps), "k_positions": places(key_steps, key_steps)}
            part = attention_forward(q[:, rows], k[:, keys], v[:, keys], **at, **options)
            partials.append(Partial(part.out, part.lse))
            share = attention_backward(
                dout[:, rows], q[:, rows], k[:, keys], v[:, keys],
                out=whole.out[:, rows], lse=whole.lse[..., rows], **at, **options,
            )  # fmt: skip
            dq[:, rows] += share.dq
            dk[:, keys] += share.dk
            dv[:, keys] += share.dv
        merged = merge(partials)
        np.testing.assert_allclose(merged.out, whole.out[:, rows], atol=1e-12)
        np.testing.assert_allclose(merged.lse, whole.lse[..., rows], atol=1e-12)
    for got, want in zip((dq, dk, dv), (wanted.dq, wanted.dk, wanted.dv), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-12)


@pytest.mark.parametrize("with_steps", [False, True])
def test_the_service_takes_positions_forward_and_backward(ctx: ga.GpuContext, with_steps: bool) -> None:
    q, k, v, dout = operands()
    options = OPTIONS["all"]
    at: dict[str, Any] = {"q_positions": places((30, 2), (4, 1)), "k_positions": places((1, 3), (0, 2))}
    if not with_steps:
        at = {name: np.ascontiguousarray(array[:, 0]) for name, array in at.items()}
    wanted = attention_forward(q, k, v, **at, **options)
    answer = ctx.flash_attn.forward(q, k, v, **at, **options, return_lse=True).result(60)
    np.testing.assert_allclose(answer.out, wanted.out, atol=1e-12)
    gradients = attention_backward(dout, q, k, v, out=answer.out, lse=answer.lse, **at, **options)
    got = ctx.flash_attn.backward(dout, q, k, v, answer.out, answer.lse, **at, **options).result(60)
    np.testing.assert_allclose(got.dk, gradients.dk, atol=1e-12)
    plain = ctx.flash_attn.forward(q, k, v, **options).result(60)
    assert np.abs(plain.out - answer.out).max() > 0.01


def test_positions_of_one_side_leave_the_other_at_the_beginning(ctx: ga.GpuContext) -> None:
    q, k, v, _ = operands()
    one = ctx.flash_attn.forward(q, k, v, causal=True, q_positions=places((3, 1), (3, 1))).result(60)
    both = ctx.flash_attn.forward(
        q, k, v, causal=True, q_positions=places((3, 1), (3, 1)), k_positions=np.zeros(2, np.int32)
    ).result(60)
    np.testing.assert_array_equal(one.out, both.out)


def test_packed_sequences_have_positions_of_their_own(ctx: ga.GpuContext) -> None:
    q, k, v, _ = operands()
    ends = np.array([0, 10, 24], np.int32)
    at = {"q_positions": places((7, 2), (0, 1)), "k_positions": places((2, 1), (1, 3))}
    options = OPTIONS["sink tokens"]
    packed = ctx.flash_attn.forward(
        q[0], k[0], v[0], cu_seqlens_q=ends, cu_seqlens_k=ends, **at, **options, return_lse=True
    ).result(60)
    for index, (first, last) in enumerate([(0, 10), (10, 24)]):
        own = {name: array[index : index + 1] for name, array in at.items()}
        alone = attention_forward(*(x[:1, first:last] for x in (q, k, v)), **own, **options)
        np.testing.assert_allclose(packed.out[first:last], alone.out[0], atol=1e-12)


def test_shards_of_heads_drop_what_the_whole_drops(ctx: ga.GpuContext) -> None:
    q, k, v, _ = operands()
    options = OPTIONS["dropout"]
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
    plain = ctx.flash_attn.inspect_key(ga.FlashForward(q, k, v))
    placed = ctx.flash_attn.inspect_key(ga.FlashForward(q, k, v, q_positions=places((0, 1), (0, 1))))
    assert (plain.kernel, plain.positions) == ("forward_sm90", False)
    assert (placed.kernel, placed.positions) == ("forward_sm90", True)
    assert ctx.flash_attn.inspect_key(ga.FlashForward(q, k, v, dropout_heads=8)) == plain


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


def test_the_last_position_that_may_be_is_taken(ctx: ga.GpuContext) -> None:
    q, k, v, _ = operands()
    last = (1 << 30) - ROWS
    at = {name: places((last, 1), (last, 1)) for name in ("q_positions", "k_positions")}
    answer = ctx.flash_attn.forward(q, k, v, causal=True, **at).result(60)
    np.testing.assert_allclose(answer.out, attention_forward(q, k, v, causal=True).out, atol=1e-12)
