"""Graphs through the actor: arrays by uid, strides, kinds of arrays, refusals, and any graph on the mock device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases.graphs import DIMS, OUT, STATS, K, Q, V, arrays_of, attention, formula, unpacked

import gpu_actors as ga
from gpu_actors.graph.match import match_attention

# Layouts


LAYOUTS = {"BSHD": (0, 2, 1, 3), "SBHD": (2, 0, 1, 3), "dim first": (3, 0, 1, 2), "packed": (0, 1, 2, 3)}


@pytest.mark.parametrize("device", ["mock", "emulated"])
def test_strides_are_the_graphs_choice(request: pytest.FixtureRequest, device: str) -> None:
    """Inputs and outputs may have any strides; kernels need contiguous rows."""
    ctx = request.getfixturevalue(device)
    arrays = arrays_of()
    expected = formula(arrays)
    for name, order in LAYOUTS.items():
        inputs = {uid: unpacked(array, order) for uid, array in arrays.items()}
        strides = tuple(step // 4 for step in inputs[Q].strides)
        graph = attention(dict.fromkeys((Q, K, V), strides), strides)
        if device == "emulated" and name == "dim first":
            with pytest.raises(ga.Unsupported, match="whole rows"):
                ctx.cudnn.execute(graph, inputs).result(60.0)
            continue
        result = ctx.cudnn.execute(graph, inputs).result(60.0)
        np.testing.assert_allclose(result[OUT], expected, atol=1e-5, err_msg=name)
        assert result[OUT].strides == inputs[Q].strides, name


def test_k_may_come_as_it_is_multiplied(mock: ga.GpuContext, emulated: ga.GpuContext) -> None:
    arrays = arrays_of()
    graph = ga.OperationGraph()
    q, v = (graph.tensor(uid=uid, dims=DIMS, dtype="float32") for uid in (Q, V))
    batch, heads, seq, dim = DIMS
    strides = (heads * seq * dim, seq * dim, 1, dim)
    k = graph.tensor(uid=K, dims=(batch, heads, dim, seq), strides=strides, dtype="float32")
    graph.output(graph.matmul(graph.softmax(graph.matmul(q, k) * 0.25), v), uid=OUT)
    for ctx in (mock, emulated):
        result = ctx.cudnn.execute(graph, arrays | {K: arrays[K].swapaxes(-1, -2)}).result(60.0)
        np.testing.assert_allclose(result[OUT], formula(arrays), atol=1e-5)


def test_torch_tensors_come_back_as_torch_tensors(mock: ga.GpuContext) -> None:
    torch = pytest.importorskip("torch")
    arrays = arrays_of()
    result = mock.cudnn.execute(attention(), {uid: torch.from_numpy(a) for uid, a in arrays.items()}).result(30.0)
    assert isinstance(result[OUT], torch.Tensor)
    np.testing.assert_allclose(result[OUT].numpy(), formula(arrays), atol=1e-5)


# Arrays that do not agree with the graph


REFUSED: dict[str, tuple[Callable[[dict[int, Any]], Any], str, str]] = {
    "no mapping": (lambda a: list(a.values()), "arrays", "mapping"),
    "a uid too much": (lambda a: a | {99: a[Q]}, "arrays", "[1, 2, 3]"),
    "an output": (lambda a: a | {OUT: a[Q]}, "arrays", "[1, 2, 3]"),
    "a uid too few": (lambda a: {Q: a[Q], K: a[K]}, "tensor 3", "must be given"),
    "no array": (lambda a: a | {K: "k"}, "tensor 2", "must be an array"),
    "another shape": (lambda a: a | {K: a[K][:, :1]}, "tensor 2", "as the graph describes it"),
    "another dtype": (lambda a: a | {K: a[K].astype(np.float16)}, "tensor 2", "float32"),
    "other strides": (lambda a: a | {K: unpacked(a[K], (0, 2, 1, 3))}, "tensor 2", "strides"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arrays_that_are_not_as_described_are_refused_by_name(mock: ga.GpuContext, name: str) -> None:
    change, field, reason = REFUSED[name]
    with pytest.raises(ga.InvalidRequest) as caught:
        mock.cudnn.execute(attention(), change(arrays_of())).result(30.0)
    assert caught.value.field == field
    assert reason in caught.value.reason


def test_what_is_no_graph_and_what_is_no_sound_graph_is_refused_by_the_reply(mock: ga.GpuContext) -> None:
    with pytest.raises(ga.InvalidRequest, match="OperationGraph"):
        mock.cudnn.execute("graph", {}).result(30.0)  # type: ignore[arg-type]
    with pytest.raises(ga.InvalidRequest, match="gives nothing"):
        mock.cudnn.execute(ga.OperationGraph(), {}).result(30.0)
    graph = attention(out_strides=(1, 1, 1, 1))
    with pytest.raises(ga.InvalidRequest, match="without gaps"):
        mock.cudnn.execute(graph, arrays_of()).result(30.0)
    with pytest.raises(ga.InvalidRequest, match="MhaForward, MhaBackward, ExecuteGraph"):
        mock.cudnn.submit(object()).result(30.0)


# Scalars


@pytest.mark.parametrize("device", ["mock", "emulated"])
def test_scalars_are_passed_with_every_request(device: str) -> None:
    with ga.open_context(device) as ctx:
        arrays = arrays_of()
        graph = ga.OperationGraph()
        q, k, v = (graph.tensor(uid=uid, dims=DIMS, dtype="float32") for uid in (Q, K, V))
        scores = graph.matmul(q, graph.transpose(k)) * graph.scalar(uid=7)
        near = abs(graph.index(scores, 2) - graph.index(scores, 3)) <= graph.scalar(uid=8, dtype="int32")
        graph.output(graph.matmul(graph.softmax(graph.select(near, scores, -np.inf)), v), uid=OUT)
        before = ctx.cudnn.plan_cache_stats().misses
        rows, keys = np.ogrid[: DIMS[2], : DIMS[2]]
        for scale, reach in ((0.25, 2), (1.5, 40), (np.float32(0.1), np.int64(1))):
            result = ctx.cudnn.execute(graph, arrays | {7: scale, 8: reach}).result(60.0)
            expected = formula(arrays, float(scale), abs(rows - keys) <= reach)
            np.testing.assert_allclose(result[OUT], expected, atol=1e-5)
        assert ctx.cudnn.plan_cache_stats().misses == before + 1
        for value, field in (({7: 0.25}, "tensor 8"), ({7: "x", 8: 1}, "tensor 7"), ({7: 1.0, 8: 1.5}, "tensor 8")):
            with pytest.raises(ga.InvalidRequest) as caught:
                ctx.cudnn.execute(graph, arrays | value).result(30.0)
            assert caught.value.field == field


def test_a_seed_may_be_passed(mock: ga.GpuContext) -> None:
    graph = ga.OperationGraph()
    q, k, v = (graph.tensor(uid=uid, dims=DIMS, dtype="float32") for uid in (Q, K, V))
    seed = graph.scalar(uid=9, dtype="uint64")
    weights = graph.dropout(graph.softmax(graph.matmul(q, graph.transpose(k)) * 0.25), 0.5, seed)
    graph.output(graph.matmul(weights, v), uid=OUT)
    arrays = arrays_of()
    one, other, again = (mock.cudnn.execute(graph, arrays | {9: n}).result(30.0)[OUT] for n in (1, 2, 1))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)
    params = ga.AttentionParams(*DIMS[:1], DIMS[2], DIMS[2], DIMS[1], DIMS[1], DIMS[3], scale=0.25).with_dropout(0.5, 2)
    same = mock.cudnn.mha_forward(params, *(arrays[uid] for uid in (Q, K, V))).result(30.0).out
    np.testing.assert_allclose(other, same, atol=1e-6)


# Any graph on the mock device, and refusals of kernels


def test_the_mock_device_computes_any_graph(mock: ga.GpuContext) -> None:
    """A feed-forward layer with its gradient, without attention."""
    rng = np.random.default_rng(3)
    arrays = {
        n: rng.standard_normal(s).astype(np.float32) for n, s in {1: (6, 8), 2: (8, 5), 3: (5,), 4: (6, 5)}.items()
    }
    graph = ga.OperationGraph()
    x, w, b, dy = (graph.tensor(uid=uid, dims=array.shape, dtype="float32") for uid, array in arrays.items())
    y = graph.max(graph.matmul(x, w) + b, 0.0)
    norm = y / (1.0 + graph.reduction(y, "sum"))
    graph.output(norm, uid=10)
    dw, db = graph.gradient(norm, dy, (w, b))
    graph.output(dw, uid=11)
    graph.output(db, uid=12)
    result = mock.cudnn.execute(graph, arrays).result(30.0)
    hidden = np.maximum(arrays[1].astype(np.float64) @ arrays[2] + arrays[3], 0)
    total = 1 + hidden.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(result[10], hidden / total, rtol=1e-5)
    dhidden = arrays[4] / total - (arrays[4] * hidden).sum(axis=-1, keepdims=True) / total**2
    dhidden = np.where(hidden > 0, dhidden, 0)
    np.testing.assert_allclose(result[11], arrays[1].T @ dhidden, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(result[12], dhidden.sum(axis=0), rtol=1e-4, atol=1e-6)


Build = Callable[[ga.OperationGraph], ga.GraphTensor]


def scores(g: ga.OperationGraph, dims: tuple[int, ...] = DIMS, *dtypes: str) -> tuple[ga.GraphTensor, ga.GraphTensor]:
    inputs = zip((Q, K, V), dtypes or ("float32",) * 3, strict=True)
    q, k, v = (g.tensor(uid=uid, dims=dims, dtype=dtype) for uid, dtype in inputs)
    return g.matmul(q, g.transpose(k)), v


def attend(g: ga.OperationGraph, modified: ga.GraphTensor, v: ga.GraphTensor) -> ga.GraphTensor:
    return g.matmul(g.softmax(modified), v)


def finish(g: ga.OperationGraph, modified: ga.GraphTensor, v: ga.GraphTensor) -> None:
    g.output(attend(g, modified, v), uid=OUT)


def by_hand(g: ga.OperationGraph) -> ga.GraphTensor:
    s, v = scores(g)
    e = g.exp(s - g.reduction(s, "max"))
    return g.matmul(e / g.reduction(e, "sum"), v)


def another_output(g: ga.OperationGraph) -> ga.GraphTensor:
    s, v = scores(g)
    out = attend(g, s, v)
    g.output(g.exp(v), uid=30)
    return out


def projected(g: ga.OperationGraph) -> ga.GraphTensor:
    q, k, v = (g.tensor(uid=uid, dims=DIMS, dtype="float32") for uid in (Q, K, V))
    return attend(g, g.matmul(g.tanh(q), g.transpose(k)), v)


def modified(change: Callable[[ga.OperationGraph, ga.GraphTensor], ga.GraphTensor]) -> Build:
    """Attention with changed scores."""

    def build(g: ga.OperationGraph) -> ga.GraphTensor:
        s, v = scores(g)
        return attend(g, change(g, s), v)

    return build


LARGE = modified(lambda g, s: g.select(g.index(s, 2) * (1 << 20) * (1 << 10) > 3, s, 0.0))
PASSED = modified(lambda g, s: g.select(g.eq(g.index(s, 2) // g.scalar(uid=9, dtype="int32"), 0), s, 0.0))
THREE, HALF, MIXED = ((DIMS[1:],), (DIMS, *["float16"] * 3), (DIMS, "float32", "float32", "float16"))
UNSUPPORTED: dict[str, tuple[Build, str, str, Any]] = {
    "no softmax": (lambda g: g.matmul(*scores(g)), "matmul_1", "must come from a softmax", "softmax"),
    "a softmax by hand": (by_hand, "div_6", "must come from a softmax", "softmax"),
    "a reduction of scores": (
        modified(lambda g, s: s - g.reduction(s, "mean")), "reduction_2", "pointwise nodes alone", "select",
    ),
    "another output": (another_output, "exp_4", "no part of the graph's attention", "attention alone"),
    "a product of what is computed": (projected, "tanh_0", "q must be an input", "an input"),
    "no attention": (
        lambda g: g.exp(g.tensor(uid=Q, dims=DIMS, dtype="float32")), "exp_0", "ends with the product", "matmul",
    ),
    "three dims": (lambda g: attend(g, *scores(g, *THREE)), "matmul_3", "of four dims", "four dims"),
    "a bias of one dim": (
        modified(lambda g, s: s * g.tensor(uid=7, dims=(DIMS[2],), dtype="float32")),
        "mul_2", "tensors of four dims", (2, 3, 24, 24),
    ),
    "an output of another dtype": (lambda g: attend(g, *scores(g, *HALF)), "tensor 4", "must be float16", "float16"),
    "mixed dtypes": (lambda g: attend(g, *scores(g, *MIXED)), "tensor 3", "v must be float32", "float32"),
    "integers beyond 32 bits": (LARGE, "mul_4", "32-bit integers", "constants, or float32"),
    "integers beyond float32": (
        modified(lambda g, s: s * (g.index(s, 2) * (1 << 22))), "mul_4", "beyond 2^24", "int32 alone",
    ),
    "a divisor that is passed": (PASSED, "floordiv_3", "could be 0", "a constant"),
    "the weights as output": (
        lambda g: g.matmul(g.output(g.softmax(scores(g)[0]), uid=30), g.tensors[V]),
        "softmax_2", "keep tensor 30 on chip", "a virtual tensor",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_no_kernel_computes_is_refused_with_the_node_and_the_nearest_and_numpy_computes_it(
    mock: ga.GpuContext, emulated: ga.GpuContext, name: str
) -> None:
    build, field, reason, nearest = UNSUPPORTED[name]
    graph = ga.OperationGraph()
    graph.output(build(graph), uid=OUT)
    with pytest.raises(ga.Unsupported) as caught:
        emulated.cudnn.inspect_plan(graph)
    assert (caught.value.field, caught.value.nearest) == (field, nearest)
    assert reason in caught.value.reason
    rng, order = np.random.default_rng(0), graph.order()
    inputs: dict[int, Any] = dict.fromkeys(order.scalars, 2)
    for uid in order.inputs:
        inputs[uid] = rng.standard_normal(graph.tensors[uid].dims).astype(graph.tensors[uid].dtype)
    with pytest.raises(ga.Unsupported):
        emulated.cudnn.execute(graph, inputs).result(10.0)
    result = mock.cudnn.execute(graph, inputs).result(10.0)
    assert set(result) == set(order.outputs)
    assert all(np.isfinite(array.astype(np.float64)).all() for array in result.values())


# Masks


def test_a_masked_nan_stays_where_it_is(mock: ga.GpuContext, emulated: ga.GpuContext) -> None:
    """A mask node keeps hidden values out of the output on the mock device as in kernels."""
    arrays = arrays_of()
    arrays[V][:, :, -1] = np.nan
    graph = ga.OperationGraph()
    s, v = scores(graph)
    weights, stats = graph.softmax_with_stats(graph.mask(s * 0.25, ga.Mask.causal()))
    graph.output(graph.matmul(weights, v), uid=OUT)
    graph.output(stats, uid=STATS)
    for ctx in (mock, emulated):
        result = ctx.cudnn.execute(graph, arrays).result(60.0)
        assert np.isfinite(result[OUT][:, :, :-1]).all()
        assert np.isnan(result[OUT][:, :, -1]).all()
        assert np.isfinite(result[STATS]).all()


def test_a_mask_that_is_not_last_is_compiled_in(mock: ga.GpuContext, emulated: ga.GpuContext) -> None:
    """A mask between other nodes is a condition like any other."""
    arrays, at = arrays_of(), np.arange(DIMS[2])
    behind = at[:, None] - at
    shown = {
        ga.Mask.causal(): behind >= 0,
        ga.Mask.causal_sliding_window(3): (behind >= 0) & (behind < 3),
        ga.Mask.sliding_window(3): abs(behind) < 3,
    }
    for mask, seen in shown.items():
        graph = ga.OperationGraph()
        s, v = scores(graph)
        finish(graph, graph.mask(s * 0.5, mask, "bottom_right") * 0.5, v)
        assert match_attention(graph).problem.mask == "full"
        for ctx in (mock, emulated) if mask.kind == "sliding_window" else (mock,):
            result = ctx.cudnn.execute(graph, arrays).result(60.0)[OUT]
            np.testing.assert_allclose(result, formula(arrays, 0.25, seen), atol=1e-5)
