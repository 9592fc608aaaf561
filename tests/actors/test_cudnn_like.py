"""Attention as cuDNN's users ask for it: its own alignment, cached plans, and params."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gpu_actors as ga

PARAMS = ga.AttentionParams(batch=2, seq_q=5, seq_kv=7, heads_q=4, heads_kv=2, head_dim=16)


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx
        assert ctx.cudnn.restarts == 0


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def operands(params: ga.AttentionParams = PARAMS, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    kv = (params.batch, params.heads_kv, params.seq_kv, params.head_dim)
    return (
        normal(params.batch, params.heads_q, params.seq_q, params.head_dim, dtype=dtype),
        normal(*kv, seed=1, dtype=dtype),
        normal(*kv, seed=2, dtype=dtype),
    )


def test_alignment_is_cudnns_own_unless_asked_for(ctx: ga.GpuContext) -> None:
    params = PARAMS.with_mask(ga.Mask.causal())
    own, top_left, bottom_right = (
        ctx.cudnn.mha_forward(one, *operands()).result(30.0).out
        for one in (params, *(dataclasses.replace(params, alignment=name) for name in ("top_left", "bottom_right")))
    )
    np.testing.assert_array_equal(own, top_left)
    assert not np.array_equal(own, bottom_right)


def test_plans_are_cached_by_everything_that_matters() -> None:
    """Mask, scale, dropout, bias and stats are all part of the signature: none may share another's plan."""
    variants: list[tuple[ga.AttentionParams, dict[str, Any]]] = [
        (PARAMS, {}),
        (PARAMS.with_mask(ga.Mask.causal()), {}),
        (PARAMS.with_mask(ga.Mask.sliding_window(2)), {}),
        (PARAMS.with_mask(ga.Mask.sliding_window(3)), {}),
        (PARAMS.with_mask(ga.Mask.causal_sliding_window(2)), {}),
        (dataclasses.replace(PARAMS, scale=0.7), {}),
        (PARAMS.with_dropout(0.5, 1), {}),
        (dataclasses.replace(PARAMS.with_mask(ga.Mask.causal()), alignment="bottom_right"), {}),
        (PARAMS, {"return_stats": True}),
        (PARAMS, {"bias": normal(1, 1, 5, 7)}),
    ]
    with ga.open_context("mock") as ctx:
        first = [ctx.cudnn.mha_forward(params, *operands(), **options).result(30.0).out for params, options in variants]
        stats = ctx.cudnn.plan_cache_stats()
        assert (stats.hits, stats.misses, stats.entries, stats.evicted) == (0, len(variants), len(variants), 0)
        for (params, options), out in zip(reversed(variants), reversed(first), strict=True):
            again = ctx.cudnn.mha_forward(params, *operands(), **options).result(30.0).out
            np.testing.assert_array_equal(again, out)
        assert ctx.cudnn.plan_cache_stats().hits == len(variants)
        # A seed is data: it shares the plan and not the answer.
        other = ctx.cudnn.mha_forward(PARAMS.with_dropout(0.5, 2), *operands()).result(30.0).out
        assert not np.array_equal(other, first[6])
        assert ctx.cudnn.plan_cache_stats().misses == len(variants)


def test_plans_are_bounded_and_the_least_recently_used_goes() -> None:
    with ga.open_context("mock") as ctx:

        def ask(scale: float) -> None:
            params = ga.AttentionParams(1, 1, 1, 1, 1, 8, scale=scale)
            ctx.cudnn.mha_forward(params, *operands(params)).result(30.0)

        for number in range(256):
            ask(1.0 + number)
        ask(1.0)
        assert ctx.cudnn.plan_cache_stats() == (1, 256, 0, 256)
        ask(1000.0)
        assert ctx.cudnn.plan_cache_stats() == (1, 257, 1, 256)
        ask(1.0)
        assert ctx.cudnn.plan_cache_stats().hits == 2, "used lately, so kept"
        ask(2.0)
        assert ctx.cudnn.plan_cache_stats() == (2, 258, 2, 256)


# Refusals


WRONG_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"batch": -1}, "batch"),
    ({"seq_q": -1}, "seq_q"),
    ({"seq_kv": -1}, "seq_kv"),
    ({"heads_q": 1.0}, "heads_q"),
    ({"heads_kv": True}, "heads_kv"),
    ({"head_dim": "16"}, "head_dim"),
    ({"heads_kv": 3}, "heads_kv"),
    ({"mask": "causal"}, "mask"),
    ({"scale": float("nan")}, "scale"),
    ({"scale": float("inf")}, "scale"),
    ({"dropout_p": 1.0}, "dropout_p"),
    ({"dropout_p": -0.5}, "dropout_p"),
    ({"dropout_seed": -1}, "dropout_seed"),
    ({"dropout_seed": 1 << 64}, "dropout_seed"),
    ({"alignment": "middle"}, "alignment"),
    ({"alignment": None}, "alignment"),
    ({"scale": "1"}, "scale"),
    ({"scale": 10**400}, "scale"),
    ({"dropout_p": "0.5"}, "dropout_p"),
    ({"dropout_seed": 1.5}, "dropout_seed"),
]


@pytest.mark.parametrize(("changes", "field"), WRONG_PARAMS)
def test_params_that_contradict_themselves_are_refused_when_made(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ga.InvalidRequest) as caught:
        dataclasses.replace(PARAMS, **changes)
    assert (caught.value.field, repr(caught.value.value)) == (field, repr(changes[field]))
    assert "must" in caught.value.reason


@pytest.mark.parametrize("width", [0, -1, 1.0, True, "2", None])
@pytest.mark.parametrize("mask", [ga.Mask.sliding_window, ga.Mask.causal_sliding_window])
def test_a_window_without_the_rows_own_key_is_refused(mask: Any, width: Any) -> None:
    with pytest.raises(ga.InvalidRequest, match="must be an int >= 1") as caught:
        mask(width)
    assert caught.value.field == "window"


WRONG_ARRAYS = {
    "q's batch": ({"q": normal(3, 4, 5, 16)}, "q", "(2, 4, 5, 16)"),
    "q in BSHD": ({"q": normal(2, 5, 4, 16)}, "q", "(2, 4, 5, 16)"),
    "q's axes": ({"q": normal(4, 5, 16)}, "q", "4 axes (batch, heads, seq, dim)"),
    "k's heads": ({"k": normal(2, 4, 7, 16)}, "k", "(2, 2, 7, 16)"),
    "k's seq": ({"k": normal(2, 2, 5, 16)}, "k", "(2, 2, 7, 16)"),
    "v's dim": ({"v": normal(2, 2, 7, 8)}, "v", "(2, 2, 7, 16)"),
    "a list": ({"v": [1.0]}, "v", "must be an array"),
    "no params": ({"params": None}, "params", "must be AttentionParams"),
    "bias' shape": ({"bias": normal(1, 1, 7, 5)}, "bias", "(1, 1, 5, 7)"),
    "mixed dtypes": ({"k": normal(2, 2, 7, 16, dtype=np.float16)}, "k", "must have q's dtype"),
}


@pytest.mark.parametrize("name", WRONG_ARRAYS)
def test_arrays_that_disagree_with_the_params_are_refused_by_name(ctx: ga.GpuContext, name: str) -> None:
    changes, field, reason = WRONG_ARRAYS[name]
    q, k, v = operands()
    with pytest.raises(ga.InvalidRequest) as caught:
        ctx.cudnn.submit(ga.MhaForward(**{"params": PARAMS, "q": q, "k": k, "v": v, **changes})).result(30.0)
    assert caught.value.field == field
    assert reason in caught.value.reason


def test_params_describe_themselves() -> None:
    assert PARAMS.is_gqa
    assert not dataclasses.replace(PARAMS, heads_kv=4).is_gqa
    assert PARAMS.with_dropout(0.5, 3) == dataclasses.replace(PARAMS, dropout_p=0.5, dropout_seed=3)
    assert PARAMS.with_mask(ga.Mask.causal()).mask.is_causal
    assert [ga.Mask.none().window, ga.Mask.sliding_window(3).window, ga.Mask.causal_sliding_window(3).window] == [
        *((-1, -1), (2, 2), (2, -1))
    ]
    assert hash(PARAMS) == hash(dataclasses.replace(PARAMS))
