"""Where a graph and its kernel could differ: rows past the end, tensors in several places, masks of broadcasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from inside.reference import evaluate_graph

import gpu_actors as ga

Q, K, V, OUT, STATS, DOUT, BIAS = 1, 2, 3, 4, 5, 6, 7
DIMS, BIAS_DIMS = (1, 2, 40, 32), (1, 2, 40, 40)  # 40 rows fill no tile of queries

Build = Callable[[ga.OperationGraph, dict[int, ga.GraphTensor]], tuple[ga.GraphTensor, ga.GraphTensor]]


def dims_of(uid: int, keys: int) -> tuple[int, ...]:
    if uid == BIAS:
        return BIAS_DIMS
    return (*DIMS[:2], keys, DIMS[3]) if uid in (K, V) else DIMS


def arrays_of(uids: tuple[int, ...], keys: int = DIMS[2]) -> dict[int, Any]:
    rng = np.random.default_rng(0)
    return {n: rng.standard_normal(dims_of(n, keys)).astype(np.float16) for n in (*uids, DOUT)}


def declared(graph: ga.OperationGraph, uids: tuple[int, ...], keys: int = DIMS[2]) -> dict[int, ga.GraphTensor]:
    return {n: graph.tensor(uid=n, dims=dims_of(n, keys), dtype="float16") for n in uids}


def dot(graph: ga.OperationGraph, q: ga.GraphTensor, k: ga.GraphTensor) -> ga.GraphTensor:
    return graph.matmul(q, graph.transpose(k)) * 0.25


def forward(build: Build, arrays: dict[int, Any]) -> dict[int, Any]:
    """The arrays with forward's results, rounded as kernels round them."""
    graph = ga.OperationGraph()
    keys = arrays[K].shape[2] if K in arrays else DIMS[2]
    scores, values = build(graph, declared(graph, tuple(n for n in arrays if n != DOUT), keys))
    weights, stats = graph.softmax_with_stats(scores)
    graph.output(graph.matmul(weights, values), uid=OUT, dtype="float16")
    graph.output(stats, uid=STATS)
    result = evaluate_graph(graph, {n: array for n, array in arrays.items() if n != DOUT})
    return arrays | {OUT: result[OUT].astype(np.float16), STATS: result[STATS].astype(np.float32)}


def backward_graph(build: Build, uids: tuple[int, ...], wrt: tuple[int, ...], keys: int = DIMS[2]) -> ga.OperationGraph:
    """Gradients 10 + uid."""
    graph = ga.OperationGraph()
    tensors = declared(graph, uids, keys)
    out, dout = (graph.tensor(uid=n, dims=DIMS, dtype="float16") for n in (OUT, DOUT))
    stats = graph.tensor(uid=STATS, dims=(*DIMS[:-1], 1), dtype="float32")
    scores, values = build(graph, tensors)
    again = graph.matmul(graph.softmax(scores), values)
    for n, gradient in zip(wrt, graph.gradient(again, dout, [tensors[n] for n in wrt], (out, stats)), strict=True):
        graph.output(gradient, uid=10 + n, dtype="float16")
    return graph


# Rows past the end: their scores are 0, where a modification or its derivative may be infinite or NaN


# As few keys as rows, and keys that fill their tiles.
@pytest.mark.parametrize(
    ("arch", "kernel", "keys"),
    [("sm_90a", "backward_sm90", 40), ("sm_90a", "backward_sm90", 128), ("sm_80", "backward_mma", 128)],
)
def test_rows_past_the_end_give_no_gradient_whatever_the_modification_makes_of_0(
    arch: str, kernel: str, keys: int
) -> None:
    """The modification is a logarithm and a signed root."""

    def build(g: ga.OperationGraph, t: dict[int, ga.GraphTensor]) -> tuple[ga.GraphTensor, ga.GraphTensor]:
        s = dot(g, t[Q], t[K])
        return g.log(abs(s)) + s / g.sqrt(abs(s)), t[V]

    arrays = forward(build, arrays_of((Q, K, V), keys))
    graph = backward_graph(build, (Q, K, V), (Q, K, V), keys)
    with ga.open_context("emulated", ga.ContextOptions(arch=arch)) as emulated:
        assert emulated.cudnn.inspect_plan(graph).key.kernel == kernel
        result = emulated.cudnn.execute(graph, arrays).result(120.0)
    for uid, expected in evaluate_graph(graph, arrays).items():
        np.testing.assert_allclose(result[uid].astype(float), expected, atol=8e-3, rtol=8e-3, err_msg=str(uid))


def test_of_equal_scores_the_first_has_the_gradient(emulated: ga.GpuContext) -> None:
    """The scores of a row of zeros are all 0; in max(score, 0) the score, the first operand, has the gradient."""

    def build(g: ga.OperationGraph, t: dict[int, ga.GraphTensor]) -> tuple[ga.GraphTensor, ga.GraphTensor]:
        return g.max(dot(g, t[Q], t[K]), 0.0), t[V]

    arrays = arrays_of((Q, K, V))
    arrays[Q][:, :, 3] = 0
    arrays = forward(build, arrays)
    graph = backward_graph(build, (Q, K, V), (Q, K, V))
    result = emulated.cudnn.execute(graph, arrays).result(120.0)[10 + Q].astype(float)
    expected = evaluate_graph(graph, arrays)[10 + Q]
    assert np.abs(expected[:, :, 3]).max() > 0.01
    np.testing.assert_allclose(result, expected, atol=8e-3, rtol=8e-3)


# Tensors in several places: their gradient is the sum of all


SHARED: dict[str, tuple[Build, tuple[int, ...], int]] = {
    "keys that are the values": (lambda g, t: (dot(g, t[Q], t[K]), t[K]), (Q, K), K),
    "queries that are the keys": (lambda g, t: (dot(g, t[Q], t[Q]), t[V]), (Q, V), Q),
    "a bias that is also a factor": (
        lambda g, t: (dot(g, t[Q], t[K]) * t[BIAS] + t[BIAS], t[V]),
        (Q, K, V, BIAS),
        BIAS,
    ),
    "a bias that is added twice": (lambda g, t: (dot(g, t[Q], t[K]) + t[BIAS] + t[BIAS], t[V]), (Q, K, V, BIAS), BIAS),
}


@pytest.mark.parametrize("name", SHARED)
def test_kernels_give_no_part_of_a_gradient_for_the_whole(emulated: ga.GpuContext, name: str) -> None:
    build, uids, shared = SHARED[name]
    with pytest.raises(ga.Unsupported) as caught:
        emulated.cudnn.inspect_plan(backward_graph(build, uids, (shared,)))
    assert caught.value.field.startswith("gradient")
    assert f"tensor {shared} is read in 2 places" in caught.value.reason
    others = tuple(uid for uid in uids if uid != shared)
    assert emulated.cudnn.inspect_plan(backward_graph(build, uids, others)).key.kernel == "backward_sm90"


def test_the_mock_device_adds_the_gradients_of_all_places() -> None:
    shared, uids, _ = SHARED["keys that are the values"]
    arrays = forward(shared, arrays_of(uids))

    def apart(g: ga.OperationGraph, t: dict[int, ga.GraphTensor]) -> tuple[ga.GraphTensor, ga.GraphTensor]:
        return dot(g, t[Q], t[K]), t[V]

    twice = arrays | {V: arrays[K]}
    result = evaluate_graph(backward_graph(shared, uids, (K,)), arrays)
    parts = evaluate_graph(backward_graph(apart, (Q, K, V), (K, V)), twice)
    np.testing.assert_allclose(result[10 + K], parts[10 + K] + parts[10 + V], atol=1e-12)


# Hidden pairs


SPECIAL: dict[str, tuple[int, int, float]] = {
    "a key that one row sees": (K, 39, np.nan),
    "a value that some see": (V, 20, np.inf),
    "a row": (Q, 20, np.inf),
    "a row's gradient": (DOUT, 20, np.nan),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_the_mock_device_keeps_what_is_hidden_out_of_gradients_as_kernels_do(
    emulated: ga.GpuContext, name: str
) -> None:
    """The modification's derivative is NaN at hidden pairs."""
    operand, place, value = SPECIAL[name]

    def build(g: ga.OperationGraph, t: dict[int, ga.GraphTensor]) -> tuple[ga.GraphTensor, ga.GraphTensor]:
        behind = g.index(t[Q], 2) - g.index(t[K], 2)
        return g.mask(g.sqrt(dot(g, t[Q], t[K]) + 10.0 * behind + 8.0), ga.Mask.causal(), "top_left"), t[V]

    arrays = arrays_of((Q, K, V))
    arrays[operand][:, :, place] = value
    arrays = forward(build, arrays)
    graph = backward_graph(build, (Q, K, V), (Q, K, V))
    result = emulated.cudnn.execute(graph, arrays).result(120.0)
    for uid, expected in evaluate_graph(graph, arrays).items():
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(np.isfinite(result[uid].astype(float)), finite, err_msg=str(uid))
        np.testing.assert_allclose(result[uid].astype(float)[finite], expected[finite], atol=8e-3, rtol=8e-3)
        if uid == 10 + Q:
            assert finite[:, :, :place].all(), "rows before it"
        elif operand in (Q, DOUT):
            assert finite[:, :, place + 1 :].all(), "keys after it"


# Masks of broadcast tensors


@pytest.mark.parametrize("dims", [(1, 1, 1, 40), (1, 1, 40, 1)])
def test_a_mask_counts_rows_and_keys_of_what_it_masks(emulated: ga.GpuContext, dims: tuple[int, ...]) -> None:
    """A kernel refuses a mask of a broadcast tensor, because it knows only the rows and keys of the scores."""
    graph = ga.OperationGraph()
    tensors = declared(graph, (Q, K, V))
    row = graph.tensor(uid=BIAS, dims=dims, dtype="float32")
    scores = dot(graph, tensors[Q], tensors[K]) + graph.mask(row, ga.Mask.causal())
    graph.output(graph.matmul(graph.softmax(scores), tensors[V]), uid=OUT, dtype="float16")
    with pytest.raises(ga.Unsupported, match="mask what has those") as caught:
        emulated.cudnn.inspect_plan(graph)
    assert (caught.value.value, caught.value.nearest) == (dims, BIAS_DIMS)


# The mask is right before the softmax, or among the modifications.
@pytest.mark.parametrize(("width", "directly"), [(1 << 31, True), (1 << 70, True), (1 << 63, False)])
def test_a_window_wider_than_all_pairs_hides_none(emulated: ga.GpuContext, width: int, directly: bool) -> None:
    def graph(mask: ga.Mask) -> ga.OperationGraph:
        graph = ga.OperationGraph()
        tensors = declared(graph, (Q, K, V))
        scores = graph.mask(dot(graph, tensors[Q], tensors[K]), mask, "bottom_right")
        scores = scores if directly else scores * 1.0
        graph.output(graph.matmul(graph.softmax(scores), tensors[V]), uid=OUT, dtype="float16")
        return graph

    wide = graph(ga.Mask.sliding_window(width))
    arrays = {uid: array for uid, array in arrays_of((Q, K, V)).items() if uid != DOUT}
    result = evaluate_graph(wide, arrays)[OUT]
    np.testing.assert_array_equal(result, evaluate_graph(graph(ga.Mask.none()), arrays)[OUT])
    by_kernel = emulated.cudnn.execute(wide, arrays).result(120.0)[OUT]
    np.testing.assert_allclose(by_kernel.astype(float), result, atol=2e-3)
