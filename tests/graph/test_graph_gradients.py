"""Graphs of gradients in the kernels: which may be asked for, layouts, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from inside.arrays import contiguous_strides
from inside.reference import evaluate_graph

import gpu_actors as ga
from gpu_actors.graph.match import match_attention

Q, K, V, OUT, STATS, DOUT, BIAS = 1, 2, 3, 4, 5, 6, 7
NAMES = {Q: "q", K: "k", V: "v", BIAS: "bias"}
ROWS, KEYS = (2, 4, 24, 32), (2, 2, 40, 32)
BIAS_DIMS = (1, 4, 24, 40)


def arrays_of(dtype: str = "float16") -> dict[int, Any]:
    rng = np.random.default_rng(0)
    shapes = {Q: ROWS, K: KEYS, V: KEYS, DOUT: ROWS, BIAS: BIAS_DIMS}
    return {uid: rng.standard_normal(shape).astype(dtype) for uid, shape in shapes.items()}


def scores_of(graph: ga.OperationGraph, q: Any, k: Any, bias: Any) -> ga.GraphTensor:
    scores = graph.tanh(graph.matmul(q, graph.transpose(k)) * 0.25) * 2.0 + bias
    return graph.mask(scores, ga.Mask.causal_sliding_window(30), "bottom_right")


def forward(arrays: dict[int, Any]) -> dict[int, Any]:
    """The arrays with forward's results, rounded as kernels round them."""
    graph, dtype = ga.OperationGraph(), arrays[Q].dtype.name
    q, k, v, bias = (graph.tensor(uid=n, dims=arrays[n].shape, dtype=dtype) for n in (Q, K, V, BIAS))
    weights, stats = graph.softmax_with_stats(scores_of(graph, q, k, bias))
    graph.output(graph.matmul(graph.dropout(weights, 0.25, 5), v), uid=OUT, dtype=dtype)
    graph.output(stats, uid=STATS)
    result = evaluate_graph(graph, arrays)
    return arrays | {OUT: result[OUT].astype(dtype), STATS: result[STATS].astype(np.float32)}


def backward_graph(
    arrays: dict[int, Any], wrt: tuple[int, ...], strides: dict[int, Any] | None = None, deterministic: bool = False
) -> ga.OperationGraph:
    """The gradient of tensor uid is output 10 + uid. strides: of tensors and gradients that are not packed."""
    graph, laid = ga.OperationGraph(), strides or {}

    def tensor(uid: int) -> ga.GraphTensor:
        array = arrays[uid]
        return graph.tensor(uid=uid, dims=array.shape, dtype=array.dtype.name, strides=laid.get(uid))

    q, k, v, bias, dout, out, stats = map(tensor, (Q, K, V, BIAS, DOUT, OUT, STATS))
    weights = graph.dropout(graph.softmax(scores_of(graph, q, k, bias)), 0.25, 5)
    again, by = graph.matmul(weights, v), [graph.tensors[uid] for uid in wrt]
    gradients = graph.gradient(again, dout, by, (out, stats), deterministic=deterministic)
    for uid, gradient in zip(wrt, gradients, strict=True):
        graph.output(gradient, uid=10 + uid, dtype=arrays[uid].dtype.name, strides=laid.get(10 + uid))
    return graph


def check(graph: ga.OperationGraph, arrays: dict[int, Any], found: dict[int, Any]) -> None:
    expected = evaluate_graph(graph, arrays)
    assert set(found) == set(expected)
    for uid, gradient in expected.items():
        assert found[uid].dtype == np.float16
        # Sums of up to 40 terms, each of a few roundings to 11 bits.
        np.testing.assert_allclose(found[uid].astype(np.float64), gradient, atol=8e-3, rtol=8e-3, err_msg=str(uid))


@pytest.mark.parametrize(
    "wrt",
    [(Q, K, V, BIAS), *(pytest.param(w, marks=pytest.mark.sweep) for w in ((V, Q), (Q,), (K,), (V,), (BIAS,)))],
    ids=lambda wrt: " ".join(NAMES[uid] for uid in wrt),
)
def test_any_of_the_gradients_may_be_asked_for(emulated: ga.GpuContext, wrt: tuple[int, ...]) -> None:
    arrays = forward(arrays_of())
    graph = backward_graph(arrays, wrt)
    match = match_attention(graph)
    assert match.problem.direction == "backward"
    assert (match.bias == BIAS) == (BIAS in wrt), "a bias without a gradient is compiled in"
    check(graph, arrays, emulated.cudnn.execute(graph, arrays).result(60.0))


@pytest.mark.parametrize(
    ("dtype", "error"), [("float32", 1e-5), pytest.param("float64", 2e-6, marks=pytest.mark.sweep)]
)  # the tolerance of an LSE in float32
def test_gradients_in_full_precision_come_from_cuda_cores(emulated: ga.GpuContext, dtype: str, error: float) -> None:
    arrays = forward(arrays_of(dtype))
    graph = backward_graph(arrays, (Q, K, V, BIAS))
    assert emulated.cudnn.inspect_plan(graph).key.kernel == "backward_simple"
    result, expected = emulated.cudnn.execute(graph, arrays).result(60.0), evaluate_graph(graph, arrays)
    for uid, gradient in expected.items():
        assert result[uid].dtype.name == dtype
        np.testing.assert_allclose(result[uid], gradient, atol=error, rtol=error, err_msg=str(uid))


def test_gradients_lie_as_the_graph_says(emulated: ga.GpuContext) -> None:
    def laid(dims: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
        packed = contiguous_strides([dims[axis] for axis in order], 1)
        return tuple(packed[order.index(axis)] for axis in range(4))

    arrays = forward(arrays_of())
    dims = {uid: array.shape for uid, array in arrays.items()} | {10 + uid: arrays[uid].shape for uid in (Q, K, V)}
    strides = {uid: laid(dims[uid], (0, 2, 1, 3)) for uid in (Q, V, DOUT, 10 + K)}
    strides |= {uid: laid(dims[uid], (2, 0, 1, 3)) for uid in (K, OUT, 10 + Q)}
    inputs = dict(arrays)
    for uid in (Q, K, V, DOUT, OUT):
        order = sorted(range(4), key=lambda axis: -strides[uid][axis])
        inputs[uid] = np.ascontiguousarray(arrays[uid].transpose(order)).transpose(np.argsort(order))
    graph = backward_graph(arrays, (BIAS, Q, K, V), strides)
    result = emulated.cudnn.execute(graph, inputs).result(60.0)
    check(graph, arrays, result)
    for uid in (10 + Q, 10 + K):
        assert tuple(step // 2 for step in result[uid].strides) == strides[uid]


def test_operands_that_lie_transposed_may_do_without_their_gradients(emulated: ga.GpuContext) -> None:
    """The graph asks for the bias's gradient alone, so the layout of the other gradients does not matter."""
    arrays = forward(arrays_of())
    inputs = arrays | {uid: arrays[uid].swapaxes(2, 3) for uid in (Q, K, V)}
    graph = ga.OperationGraph()

    def tensor(uid: int) -> ga.GraphTensor:
        array = inputs[uid]
        strides = [step // array.itemsize for step in array.strides]
        return graph.tensor(uid=uid, dims=array.shape, dtype=array.dtype.name, strides=strides)

    q, k, v, bias, dout, out, stats = map(tensor, (Q, K, V, BIAS, DOUT, OUT, STATS))
    scores = graph.tanh(graph.matmul(graph.transpose(q), k) * 0.25) * 2.0 + bias
    scores = graph.mask(scores, ga.Mask.causal_sliding_window(30), "bottom_right")
    weights = graph.dropout(graph.softmax(scores), 0.25, 5)
    (gradient,) = graph.gradient(graph.matmul(weights, graph.transpose(v)), dout, [bias], (out, stats))
    graph.output(gradient, uid=10 + BIAS, dtype="float16")
    check(graph, inputs, emulated.cudnn.execute(graph, inputs).result(60.0))


def test_deterministic_gradients_are_another_plan(emulated: ga.GpuContext) -> None:
    arrays = forward(arrays_of())
    plain, fixed = (backward_graph(arrays, (Q,), deterministic=flag) for flag in (False, True))
    assert plain.signature() != fixed.signature()
    assert [emulated.cudnn.inspect_plan(graph).key.deterministic for graph in (plain, fixed)] == [False, True]


# Refusals


def attention(g: ga.OperationGraph, dtype: str = "float16") -> tuple[list[ga.GraphTensor], ga.GraphTensor]:
    tensors = [g.tensor(uid=n, dims=ROWS, dtype=dtype) for n in (Q, K, V, OUT, DOUT)]
    q, k, v, *_ = tensors
    return tensors, g.matmul(g.softmax(g.matmul(q, g.transpose(k)) * 0.25), v)


def stats_of(g: ga.OperationGraph) -> ga.GraphTensor:
    return g.tensor(uid=STATS, dims=(*ROWS[:-1], 1), dtype="float32")


def without_forward(g: ga.OperationGraph) -> None:
    (q, _, _, _, dout), out = attention(g)
    del g.tensors[OUT]
    g.output(g.gradient(out, dout, (q,))[0], uid=11, dtype="float16")


def by_a_table(g: ga.OperationGraph) -> None:
    tensors = [g.tensor(uid=n, dims=ROWS, dtype="float16") for n in (Q, K, V, OUT, DOUT)]
    q, k, v, forward_out, dout = tensors
    table = g.tensor(uid=BIAS, dims=(1, 4, 1, 1), dtype="float32")
    out = g.matmul(g.softmax(g.matmul(q, g.transpose(k)) * table), v)
    g.output(g.gradient(out, dout, (table,), (forward_out, stats_of(g)))[0], uid=11)


def forward_too(g: ga.OperationGraph) -> None:
    (q, _, _, forward_out, dout), out = attention(g)
    g.output(g.gradient(out, dout, (q,), (forward_out, stats_of(g)))[0], uid=11, dtype="float16")
    g.output(out, uid=12, dtype="float16")


def recomputed(g: ga.OperationGraph) -> None:
    (q, _, _, forward_out, dout), out = attention(g)
    gradient = g.gradient(out, g.exp(dout), (q,), (forward_out, stats_of(g)))[0]
    g.output(gradient, uid=11, dtype="float16")


def wide_gradient(g: ga.OperationGraph) -> None:
    (q, _, _, forward_out, dout), out = attention(g)
    g.output(g.gradient(out, dout, (q,), (forward_out, stats_of(g)))[0], uid=11, dtype="float32")


UNSUPPORTED: dict[str, tuple[Callable[[ga.OperationGraph], None], str, str]] = {
    "without what forward gave": (without_forward, "gradient_5", "read what forward gave"),
    "by a tensor of the modification": (by_a_table, "gradient_5", "only of q, k, v and a plainly added bias"),
    "forward and backward at once": (forward_too, "matmul_4", "keep tensor 12 on chip"),
    "of what is computed": (recomputed, "exp_5", "so it must be an input"),
    "in another dtype": (wide_gradient, "tensor 11", "must be float16"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_gradients_that_no_kernel_gives_are_refused_by_name(emulated: ga.GpuContext, name: str) -> None:
    build, field, reason = UNSUPPORTED[name]
    graph = ga.OperationGraph()
    build(graph)
    graph.validate()
    with pytest.raises(ga.Unsupported) as caught:
        emulated.cudnn.inspect_plan(graph)
    assert caught.value.field == field
    assert reason in caught.value.reason
