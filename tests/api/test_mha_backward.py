"""mha_backward: the gradients of mha_forward, for every mask, with bias, GQA, dropout and any strides."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gpu_actors as ga
from gpu_actors.graph.mha import MhaUid, TensorLayout, mha_backward_graph

PARAMS = ga.AttentionParams(batch=2, seq_q=5, seq_kv=7, heads_q=4, heads_kv=2, head_dim=8, scale=0.4)
MASKS = (ga.Mask.none(), ga.Mask.causal(), ga.Mask.sliding_window(3), ga.Mask.causal_sliding_window(2))


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


def slope(ctx: ga.GpuContext, params: ga.AttentionParams, a: dict[str, Any], bias: Any, name: str, to: Any) -> float:
    """The derivative of sum(o * do) along a direction, by central differences."""
    step = 1e-5

    def value(sign: float) -> float:
        moved = {**a, "bias": bias}
        moved[name] = moved[name] + sign * step * to
        out = ctx.cudnn.mha_forward(params, moved["q"], moved["k"], moved["v"], bias=moved["bias"]).result(30.0).out
        return float((out * a["do"]).sum())

    return (value(1.0) - value(-1.0)) / (2 * step)


@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.kind)
def test_gradients_are_the_slopes_of_the_forward(ctx: ga.GpuContext, mask: ga.Mask, alignment: Any) -> None:
    params = dataclasses.replace(PARAMS, mask=mask, alignment=alignment, dropout_p=0.2, dropout_seed=3)
    a = operands(params)
    rng = np.random.default_rng(1)
    bias = rng.standard_normal((1, 4, 5, 7))
    found = backward(ctx, params, a, bias)
    for name in ("q", "k", "v", "bias"):
        gradient = getattr(found, f"d{name}")
        operand = bias if name == "bias" else a[name]
        assert (gradient.shape, gradient.dtype) == (operand.shape, operand.dtype)
        to = rng.standard_normal(operand.shape)
        np.testing.assert_allclose((gradient * to).sum(), slope(ctx, params, a, bias, name, to), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rows", [5, 1])
@pytest.mark.parametrize("shape", [(2, 4), (1, 4), (2, 1), (1, 1)])
def test_the_gradient_of_a_bias_is_summed_over_what_it_is_broadcast_along(
    ctx: ga.GpuContext, shape: Any, rows: int
) -> None:
    bias = np.random.default_rng(2).standard_normal((*shape, rows, 7))
    a = operands(PARAMS)
    whole = backward(ctx, PARAMS, a, np.broadcast_to(bias, (2, 4, 5, 7)).copy()).dbias
    axes = tuple(axis for axis, extent in enumerate((*shape, rows)) if extent == 1)
    np.testing.assert_allclose(backward(ctx, PARAMS, a, bias).dbias, whole.sum(axis=axes, keepdims=True), atol=1e-12)


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.kind)
def test_a_graph_gives_the_same_gradients(ctx: ga.GpuContext, mask: ga.Mask) -> None:
    """NumPy's reverse mode over the graph, and the oracle's own formula."""
    params = dataclasses.replace(PARAMS, mask=mask, dropout_p=0.3, dropout_seed=9)
    a = operands(params)
    bias = np.random.default_rng(2).standard_normal((1, 4, 5, 7))
    forward = ctx.cudnn.mha_forward(params, a["q"], a["k"], a["v"], bias=bias, return_stats=True).result(30.0)
    wanted = backward(ctx, params, a, bias)
    names = {MhaUid.Q: a["q"], MhaUid.K: a["k"], MhaUid.V: a["v"], MhaUid.BIAS: bias, MhaUid.DOUT: a["do"]}
    names |= {MhaUid.OUT: forward.out, MhaUid.STATS: forward.stats}
    packed = {uid: np.ascontiguousarray(array) for uid, array in names.items()}
    layouts = {uid: TensorLayout(array.shape, array.dtype.name) for uid, array in packed.items()}
    graph = mha_backward_graph(dataclasses.replace(params, dropout_seed=9), layouts)
    found = ctx.cudnn.execute(graph, packed).result(30.0)
    for uid, name in ((MhaUid.DQ, "dq"), (MhaUid.DK, "dk"), (MhaUid.DV, "dv"), (MhaUid.DBIAS, "dbias")):
        # The oracle of mha_backward takes its weights from the stats, which are fp32.
        np.testing.assert_allclose(found[uid], getattr(wanted, name), rtol=1e-6, atol=1e-6, err_msg=name)


def test_without_a_bias_there_is_no_gradient_of_one(ctx: ga.GpuContext) -> None:
    found = backward(ctx, PARAMS, operands(PARAMS))
    assert (found.dbias, found.dsinks) == (None, None)


def test_rows_that_see_no_key_have_no_gradient(ctx: ga.GpuContext) -> None:
    params = ga.AttentionParams(1, 4, 2, 1, 1, 8, mask=ga.Mask.causal(), alignment="bottom_right")
    found = backward(ctx, params, operands(params))
    assert not found.dq[0, 0, :2].any()
    assert np.isfinite(found.dk).all()


def test_strides_are_the_callers_choice(ctx: ga.GpuContext) -> None:
    a = operands(PARAMS)
    wanted = backward(ctx, PARAMS, a)
    views = {name: np.ascontiguousarray(array.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3) for name, array in a.items()}
    for gradient, expected in zip(backward(ctx, PARAMS, views)[:3], wanted[:3], strict=True):
        np.testing.assert_array_equal(gradient, expected)


def test_strides_may_go_backwards(ctx: ga.GpuContext) -> None:
    params = dataclasses.replace(PARAMS, scale=0.2)
    a = operands(params)
    views = {name: np.ascontiguousarray(array[:, ::-1, ::-1])[:, ::-1, ::-1] for name, array in a.items()}
    for gradient, expected in zip(backward(ctx, params, views)[:3], backward(ctx, params, a)[:3], strict=True):
        np.testing.assert_array_equal(gradient, expected)


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
