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
    """Mask, alignment, scale, dropout, bias and stats are part of the signature: requests that differ share no plan."""
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
        # A seed is data: another seed uses the same plan and gives another answer.
        other = ctx.cudnn.mha_forward(PARAMS.with_dropout(0.5, 2), *operands()).result(30.0).out
        assert not np.array_equal(other, first[6])
        assert ctx.cudnn.plan_cache_stats().misses == len(variants)


# Refusals


def gradient_arrays(dtype: Any = np.float32) -> dict[str, Any]:
    """All arrays of a backward request."""
    q, k, v = operands(dtype=dtype)
    return {"q": q, "k": k, "v": v, "o": q, "do": q, "stats": np.zeros((2, 4, 5, 1), np.float32)}


WRONG_ARRAYS: list[tuple[dict[str, Any], str, str]] = [
    ({"q": normal(3, 4, 5, 16)}, "q", "(2, 4, 5, 16)"),
    ({"q": normal(2, 5, 4, 16)}, "q", "(2, 4, 5, 16)"),
    ({"q": normal(4, 5, 16)}, "q", "4 axes (batch, heads, seq, dim)"),
    ({"k": normal(2, 4, 7, 16)}, "k", "(2, 2, 7, 16)"),
    ({"k": normal(2, 2, 5, 16)}, "k", "(2, 2, 7, 16)"),
    ({"v": normal(2, 2, 7, 8)}, "v", "(2, 2, 7, 16)"),
    ({"v": [1.0]}, "v", "must be an array"),
    ({"params": None}, "params", "must be AttentionParams"),
    ({"bias": normal(1, 1, 7, 5)}, "bias", "(1, 1, 5, 7)"),
    ({"k": normal(2, 2, 7, 16, dtype=np.float16)}, "k", "must have q's dtype"),
]
WRONG_GRADIENTS: list[tuple[dict[str, Any], str, str]] = [
    ({"o": normal(2, 4, 4, 16)}, "o", "must have the shape that the params give it, (2, 4, 5, 16)"),
    ({"do": normal(2, 4, 4, 16)}, "do", "must have the shape that the params give it, (2, 4, 5, 16)"),
    ({"stats": normal(2, 4, 4, 1)}, "stats", "must have the shape that the params give it, (2, 4, 5, 1)"),
    ({"k": normal(2, 2, 6, 16)}, "k", "must have the shape that the params give it, (2, 2, 7, 16)"),
    *(({name: None}, name, "") for name in ("o", "do", "stats")),
    *(({name: normal(2, 4, 5, 16, dtype=np.float64)}, name, "") for name in ("o", "do")),
    ({"stats": np.zeros((2, 4, 5, 1), np.float16)}, "stats", ""),
    ({"deterministic": 1}, "deterministic", ""),
]


def test_arrays_that_disagree_with_the_params_are_refused_by_name(ctx: ga.GpuContext) -> None:
    sound = {"params": PARAMS, **gradient_arrays()}
    forward = {name: sound[name] for name in ("params", "q", "k", "v")}
    asked = [(ga.MhaForward(**{**forward, **wrong[0]}), wrong) for wrong in WRONG_ARRAYS]
    asked += [(ga.MhaBackward(**{**sound, **wrong[0]}), wrong) for wrong in WRONG_GRADIENTS]
    for message, (_, field, reason) in asked:
        with pytest.raises(ga.InvalidRequest) as caught:
            ctx.cudnn.submit(message).result(30.0)
        assert caught.value.field == field
        assert reason in caught.value.reason


def test_forward_and_either_kind_of_backward_are_plans_of_their_own() -> None:
    with ga.open_context("mock") as ctx:
        arrays = gradient_arrays()
        for _ in range(2):
            for params in (PARAMS, PARAMS.with_dropout(0.0, 7)):
                ctx.cudnn.mha_forward(params, *operands(), return_stats=True).result(30.0)
                for deterministic in (False, True):
                    ctx.cudnn.mha_backward(params, **arrays, deterministic=deterministic).result(30.0)
        assert ctx.cudnn.plan_cache_stats().misses == 3


def test_a_scale_that_no_kernel_takes_is_refused_by_the_name_that_the_params_have() -> None:
    params = ga.AttentionParams(1, 8, 8, 1, 1, 32, scale=1e37)
    q = np.ones((1, 1, 8, 32), np.float16)
    with ga.open_context("emulated") as emulated, pytest.raises(ga.Unsupported) as caught:
        emulated.cudnn.mha_forward(params, q, q, q).result(30.0)
    assert (caught.value.field, caught.value.nearest) == ("scale", 1e36)


def test_params_describe_themselves() -> None:
    assert PARAMS.is_gqa
    assert not dataclasses.replace(PARAMS, heads_kv=4).is_gqa
    assert PARAMS.with_dropout(0.5, 3) == dataclasses.replace(PARAMS, dropout_p=0.5, dropout_seed=3)
    assert PARAMS.with_mask(ga.Mask.causal()).mask.is_causal
    assert [ga.Mask.none().window, ga.Mask.sliding_window(3).window, ga.Mask.causal_sliding_window(3).window] == [
        *((-1, -1), (2, 2), (2, -1))
    ]
    assert hash(PARAMS) == hash(dataclasses.replace(PARAMS))
