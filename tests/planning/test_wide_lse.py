"""The LSE in float64 of float64 inputs: forward, the merge of its partials, backward, and graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import gpu_actors as ga
from gpu_actors.partial import merge

SHAPE = (2, 33, 4, 16)
KEYS = 50
DENSE = {"causal": True, "return_lse": True}
WIDE = {**DENSE, "lse_dtype": "float64"}


@pytest.fixture(scope="module", params=["mock", "emulated"])
def ctx(request: pytest.FixtureRequest) -> Iterator[ga.GpuContext]:
    with ga.open_context(request.param, ga.ContextOptions(arch="sm_80")) as opened:
        yield opened


def operands(dtype: str = "float64") -> tuple[Any, ...]:
    rng = np.random.default_rng(5)
    shapes = (SHAPE, (2, KEYS, 2, 16), (2, KEYS, 2, 16))
    return tuple((3.0 * rng.standard_normal(shape)).astype(dtype) for shape in shapes)


def explicit(q: Any, k: Any, v: Any, first: int = 0) -> tuple[Any, Any]:
    """out and LSE over the keys from ``first`` on, causal, by the formula."""
    k, v = (np.repeat(array, 2, axis=2) for array in (k, v))
    scores = np.einsum("bihd,bjhd->bhij", q, k) / 4.0
    scores = np.where(np.arange(KEYS) <= np.arange(SHAPE[1])[:, None] + KEYS - SHAPE[1], scores, -np.inf)[..., first:]
    lse = np.logaddexp.reduce(scores, axis=-1)
    return np.einsum("bhij,bjhd->bihd", np.exp(scores - lse[..., None]), v[:, first:]), lse


def test_forward_gives_all_its_digits(ctx: ga.GpuContext) -> None:
    q, k, v = operands()
    out, lse = explicit(q, k, v)
    found = ctx.flash_attn.forward(q, k, v, **WIDE).result(60)
    assert found.lse.dtype == np.float64
    np.testing.assert_allclose(found.lse, lse, rtol=1e-14)
    np.testing.assert_allclose(found.out, out, rtol=1e-11, atol=1e-13)
    narrow = ctx.flash_attn.forward(q, k, v, **DENSE).result(60)
    assert narrow.lse.dtype == np.float32
    assert np.abs(narrow.lse - lse).max() > 1e-9, "what lse_dtype is for"


def test_partials_merge_to_the_whole(ctx: ga.GpuContext) -> None:
    q, k, v = operands()
    out, lse = explicit(q, k, v)
    whole = {"return_lse": True, "lse_dtype": "float64"}
    own = [np.arange(KEYS) < 17, np.arange(KEYS) >= 17]  # every row sees the first 17 keys
    parts = [ctx.flash_attn.forward(q, k[:, own[0]], v[:, own[0]], **whole).result(60)]
    parts += [ctx.flash_attn.forward(q, k[:, own[1]], v[:, own[1]], causal=True, **whole).result(60)]
    for merged in (merge(parts), ctx.flash_attn.merge(parts).result(60)):
        assert merged.lse.dtype == np.float64
        np.testing.assert_allclose(merged.out, out, rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(merged.lse, lse, rtol=1e-14)


def test_backward_reads_it(ctx: ga.GpuContext) -> None:
    q, k, v = operands()
    out, lse = explicit(q, k, v)
    dout = np.random.default_rng(1).standard_normal(SHAPE)
    given = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "causal": True}
    found = ctx.flash_attn.backward(**given, lse=lse).result(60)
    near = ctx.flash_attn.backward(**given, lse=lse.astype(np.float32)).result(60)
    # The sum of dv * v is known, because the loss is linear in v.
    np.testing.assert_allclose((found.dv * v).sum(), (dout * out).sum(), rtol=1e-12)
    for exact, rounded in zip(found[:3], near[:3], strict=True):
        np.testing.assert_allclose(rounded, exact, atol=1e-4)
        assert np.abs(rounded - exact).max() > 1e-9


def test_stats_of_graphs_have_it(ctx: ga.GpuContext) -> None:
    """float64 is the default dtype of stats of float64 inputs, and backward reads either dtype."""
    q, k, v = (np.ascontiguousarray(array.swapaxes(1, 2)) for array in operands())
    graph = ga.OperationGraph()
    inputs = [graph.tensor(uid=n, dims=array.shape, dtype="float64") for n, array in enumerate((q, k, v), 1)]
    scores = graph.matmul(inputs[0], graph.transpose(inputs[1])) * 0.25
    weights, stats = graph.softmax_with_stats(graph.mask(scores, ga.Mask.causal(), "bottom_right"))
    graph.output(graph.matmul(weights, inputs[2]), uid=4)
    graph.output(stats, uid=5)
    found = ctx.cudnn.execute(graph, {1: q, 2: k, 3: v}).result(60)
    _, lse = explicit(*operands())
    assert found[5].dtype == np.float64
    np.testing.assert_allclose(found[5][..., 0], lse, rtol=1e-14)
    assert ctx.cudnn.inspect_plan(graph).key.wide_lse
    back = ga.OperationGraph()
    inputs = [back.tensor(uid=n, dims=array.shape, dtype="float64") for n, array in enumerate((q, k, v), 1)]
    scores = back.matmul(inputs[0], back.transpose(inputs[1])) * 0.25
    again = back.matmul(back.softmax(back.mask(scores, ga.Mask.causal(), "bottom_right")), inputs[2])
    out, dout = (back.tensor(uid=uid, dims=q.shape, dtype="float64") for uid in (4, 6))
    given = back.tensor(uid=5, dims=(*q.shape[:3], 1), dtype="float64")
    back.output(back.gradient(again, dout, (inputs[2],), (out, given))[0], uid=13)
    direction = np.random.default_rng(1).standard_normal(q.shape)
    dv = ctx.cudnn.execute(back, {1: q, 2: k, 3: v, 4: found[4], 5: found[5], 6: direction}).result(60)[13]
    np.testing.assert_allclose((dv * v).sum(), (direction * found[4]).sum(), rtol=1e-12)


def test_what_would_hold_no_more_digits_is_refused() -> None:
    with ga.open_context("mock") as ctx:
        for change, error, says in (
            ({"lse_dtype": "float16"}, ga.InvalidRequest, 'must be "float32", or "float64" for float64 inputs'),
            ({"lse_dtype": np.float64}, ga.InvalidRequest, "must be"),
            ({"return_lse": False}, ga.InvalidRequest, "goes with return_lse=True"),
            ({"dtype": "float32"}, ga.Unsupported, "scores of float32 inputs are float32"),
            ({"dtype": "float16"}, ga.Unsupported, "hold no more"),
        ):
            options: dict[str, Any] = {**WIDE, **change}
            q, k, v = operands(options.pop("dtype", "float64"))
            with pytest.raises(error, match=says) as caught:
                ctx.flash_attn.forward(q, k, v, **options).result(10)
            assert caught.value.field == "lse_dtype"
        q, k, v = operands("float16")
        lse = np.zeros((2, 4, 33))
        with pytest.raises(ga.InvalidRequest, match="float32") as caught:
            ctx.flash_attn.backward(q, q, k, v, q, lse).result(10)
        assert caught.value.field == "lse"
        given = {"q": q, "k": k, "v": v, "out": q, "dout": q, "lse": lse.astype(np.float32)}
        with pytest.raises(ga.InvalidRequest, match="its own dtype") as caught:
            ctx.flash_attn.inspect_key(ga.FlashBackward(**given, return_lse=True, lse_dtype="float64"))
        assert caught.value.field == "lse_dtype"
