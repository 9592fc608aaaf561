"""mha_backward: its graph, its plans and what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gpu_actors as ga

PARAMS = ga.AttentionParams(batch=2, seq_q=5, seq_kv=7, heads_q=4, heads_kv=2, head_dim=8, scale=0.4)


@pytest.fixture(scope="module")
def ctx() -> Iterator[ga.GpuContext]:
    with ga.open_context("mock") as ctx:
        yield ctx
        assert ctx.cudnn.restarts == 0


def operands(params: ga.AttentionParams, dtype: Any = np.float64) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    p = params
    rows, keys = (p.batch, p.heads_q, p.seq_q, p.head_dim), (p.batch, p.heads_kv, p.seq_kv, p.head_dim)
    shapes = {"q": rows, "k": keys, "v": keys, "do": rows}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def backward(ctx: ga.GpuContext, params: ga.AttentionParams, a: dict[str, Any], bias: Any = None) -> Any:
    forward = ctx.cudnn.mha_forward(params, a["q"], a["k"], a["v"], bias=bias, return_stats=True).result(30.0)
    operands = (a["q"], a["k"], a["v"], forward.out, a["do"], forward.stats)
    return ctx.cudnn.mha_backward(params, *operands, bias=bias).result(30.0)


def test_plans_of_forward_and_backward_are_apart() -> None:
    with ga.open_context("mock") as ctx:
        params = dataclasses.replace(PARAMS, scale=0.123)
        before = ctx.cudnn.plan_cache_stats().misses
        for _ in range(2):
            backward(ctx, params, operands(params))
            backward(ctx, params.with_dropout(0.0, 7), operands(params))
        assert ctx.cudnn.plan_cache_stats().misses == before + 2


def test_deterministic_gradients_are_another_plan() -> None:
    with ga.open_context("mock") as ctx:
        params, a = dataclasses.replace(PARAMS, scale=0.77), operands(PARAMS)
        given = {**a, "o": a["do"], "stats": np.zeros((2, 4, 5, 1), np.float32)}
        before = ctx.cudnn.plan_cache_stats().misses
        for deterministic in (False, True, True):
            ctx.cudnn.mha_backward(params, **given, deterministic=deterministic).result(30.0)
        assert ctx.cudnn.plan_cache_stats().misses == before + 2
        with pytest.raises(ga.InvalidRequest, match="deterministic"):
            ctx.cudnn.mha_backward(PARAMS, **given, deterministic=1).result(30.0)  # type: ignore[arg-type]


WRONG = {
    "o": ("o", "must have the shape that the params give it, (2, 4, 5, 8)"),
    "do": ("do", "must have the shape that the params give it, (2, 4, 5, 8)"),
    "stats": ("stats", "must have the shape that the params give it, (2, 4, 5, 1)"),
    "k": ("k", "must have the shape that the params give it, (2, 2, 7, 8)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arrays_that_disagree_with_the_params_are_refused_by_name(ctx: ga.GpuContext, name: str) -> None:
    field, reason = WRONG[name]
    a = operands(PARAMS)
    given = {**a, "o": a["do"], "stats": np.zeros((2, 4, 5, 1), np.float32)}
    given[name] = given[name][:, :, :-1]
    with pytest.raises(ga.InvalidRequest) as caught:
        ctx.cudnn.submit(ga.MhaBackward(params=PARAMS, **given)).result(30.0)
    assert caught.value.field == field
    assert reason in caught.value.reason


@pytest.mark.parametrize("name", ["o", "do", "stats"])
def test_what_is_missing_is_named(ctx: ga.GpuContext, name: str) -> None:
    a = operands(PARAMS)
    given = {**a, "o": a["do"], "stats": np.zeros((2, 4, 5, 1), np.float32), name: None}
    with pytest.raises(ga.InvalidRequest) as caught:
        ctx.cudnn.submit(ga.MhaBackward(params=PARAMS, **given)).result(30.0)
    assert caught.value.field == name


OTHER_DTYPES = {"o": np.float32, "do": np.float32, "stats": np.float16}


@pytest.mark.parametrize("name", OTHER_DTYPES)
def test_dtypes_that_backward_does_not_take_are_refused_by_the_callers_name(ctx: ga.GpuContext, name: str) -> None:
    a = operands(PARAMS)
    given = {**a, "o": a["do"], "stats": np.zeros((2, 4, 5, 1), np.float32)}
    given[name] = given[name].astype(OTHER_DTYPES[name])
    with pytest.raises(ga.InvalidRequest) as caught:
        ctx.cudnn.submit(ga.MhaBackward(params=PARAMS, **given)).result(30.0)
    assert caught.value.field == name


def test_a_scale_that_no_kernel_takes_is_refused_by_the_name_that_the_params_have() -> None:
    params = ga.AttentionParams(1, 8, 8, 1, 1, 32, scale=1e37)
    q = np.ones((1, 1, 8, 32), np.float16)
    with ga.open_context("emulated") as emulated, pytest.raises(ga.Unsupported) as caught:
        emulated.cudnn.mha_forward(params, q, q, q).result(30.0)
    assert (caught.value.field, caught.value.nearest) == ("scale", 1e36)
