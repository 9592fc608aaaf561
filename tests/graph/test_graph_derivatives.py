"""Derivatives of graphs: NumPy's against finite differences, and the compiled ones against NumPy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases.random_graphs import DIMS, RESULT, SCORE, RandomGraph
from emulated.score_probe import run_probe
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inside.reference import evaluate_graph

import gpu_actors as ga
from gpu_actors.graph.modification import ScoreInputs

STEP = 1e-6


def scores(seed: int) -> Any:
    # Another random stream than the tensors': equal numbers meet where maxima and conditions have no derivative.
    return 2.0 * np.random.default_rng((seed, 1)).standard_normal(DIMS)


def differentiated(graph: ga.OperationGraph, result: int, wrt: int) -> ga.OperationGraph:
    """The graph with output 91, the gradient by ``wrt`` of a result whose own gradient is tensor 90."""
    tensor = graph.tensors[result]
    doutput = graph.tensor(uid=90, dims=tensor.dims, dtype="float64")
    (gradient,) = graph.gradient(tensor, doutput, (graph.tensors[wrt],))
    graph.output(gradient, uid=91)
    return graph


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 1 << 20))
def test_gradients_are_finite_differences(seed: int) -> None:
    """By the scores or by another float tensor that the random graph reads."""
    random = RandomGraph(seed)
    rng = np.random.default_rng(seed + 1)
    score, doutput = scores(seed), rng.standard_normal(DIMS)
    values = {SCORE: score, **random.values}
    floats = [uid for uid, v in values.items() if isinstance(v, np.ndarray) and v.dtype.kind == "f"]
    wrt = floats[seed % len(floats)]
    to = rng.standard_normal(values[wrt].shape)
    ends = []
    for sign in (1.0, -1.0):
        moved = {**values, wrt: values[wrt] + sign * STEP * to}
        ends.append(evaluate_graph(random.graph, moved)[RESULT])
    # Jumps (floor, mod, select) have no derivative. If one lies between the ends, the difference is huge.
    slope = (ends[0] - ends[1]) / (2 * STEP)
    smooth = np.abs(ends[0] - ends[1]) < 1e-3
    dsmooth = np.where(smooth, doutput, 0.0)
    graph = differentiated(random.graph, RESULT, wrt)
    gradient = evaluate_graph(graph, {**values, 90: dsmooth})[91]
    np.testing.assert_allclose((gradient * to).sum(), (slope * dsmooth).sum(), rtol=1e-5, atol=1e-5)


WHOLE: dict[str, Callable[[ga.OperationGraph, ga.GraphTensor, ga.GraphTensor], ga.GraphTensor]] = {
    **{
        f"{kind} over {axes}": lambda g, a, b, kind=kind, axes=axes: g.reduction(a * b, kind, axes) * a
        for kind in ("sum", "mean", "max", "min")
        for axes in (-1, (0, 2))
    },
    "softmax": lambda g, a, b: g.softmax(a) * b,
    "both outputs of a softmax": lambda g, a, b: sum(g.softmax_with_stats(a * b), start=a),
    "matmul": lambda g, a, b: g.matmul(a, g.transpose(b)),
    "shared heads": lambda g, a, b: g.matmul(a, g.transpose(g.reduction(b, "sum", 1))),
    "dropout": lambda g, a, b: g.dropout(g.softmax(a), 0.3, 7) * b,
    "masks": lambda g, a, b: g.softmax(g.mask(a, ga.Mask.causal(), "bottom_right")) * b,
}


@pytest.mark.parametrize("name", WHOLE)
def test_gradients_of_what_is_not_pointwise_are_finite_differences(name: str) -> None:
    rng = np.random.default_rng(0)
    values = {uid: rng.standard_normal(DIMS) for uid in (1, 2)}
    graph = ga.OperationGraph()
    a, b = (graph.tensor(uid=uid, dims=DIMS, dtype="float64") for uid in (1, 2))
    result = graph.output(WHOLE[name](graph, a, b), uid=3)
    dresult = rng.standard_normal(result.dims)
    for wrt in (1, 2):
        to = rng.standard_normal(DIMS)
        ends = [evaluate_graph(graph, {**values, wrt: values[wrt] + sign * STEP * to})[3] for sign in (1.0, -1.0)]
        slope = ((ends[0] - ends[1]) / (2 * STEP) * dresult).sum()
        again = ga.OperationGraph()
        c, d = (again.tensor(uid=uid, dims=DIMS, dtype="float64") for uid in (1, 2))
        again.output(WHOLE[name](again, c, d), uid=3)
        gradient = evaluate_graph(differentiated(again, 3, wrt), {**values, 90: dresult})[91]
        np.testing.assert_allclose((gradient * to).sum(), slope, rtol=1e-7, atol=1e-7)


def test_equal_largest_elements_share_a_gradient() -> None:
    graph = ga.OperationGraph()
    a = graph.tensor(uid=1, dims=(1, 4), dtype="float64")
    graph.output(graph.reduction(a, "max"), uid=3)
    gradient = evaluate_graph(differentiated(graph, 3, 1), {1: np.array([[2.0, 1.0, 2.0, 0.0]]), 90: np.ones((1, 1))})[
        91
    ]
    np.testing.assert_array_equal(gradient, [[0.5, 0.0, 0.5, 0.0]])


# Compiled derivatives


def check_compiled(graph: ga.OperationGraph, score: int, result: int, values: dict[int, Any], given: Any) -> None:
    """Compare value and derivative of the generated CUDA, run in double on the CPU, element by element."""
    modification = ScoreInputs(graph, score, graph.tensors[result].dims).modification(result)
    assert modification.mod.real == "double"
    dscore = np.random.default_rng(5).standard_normal(given.shape)
    value, gradient = run_probe(modification, values, given, dscore)
    expected = evaluate_graph(graph, {**values, score: given})[result]
    np.testing.assert_allclose(value, expected, rtol=1e-12, atol=1e-12)
    gradients = evaluate_graph(differentiated(graph, result, score), {**values, score: given, 90: dscore})[91]
    np.testing.assert_allclose(gradient, gradients, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(n, marks=pytest.mark.sweep) for n in range(2, 60))])
def test_random_modifications_are_compiled_with_their_derivatives(seed: int) -> None:
    random = RandomGraph(seed, size=24)
    check_compiled(random.graph, SCORE, RESULT, random.values, scores(seed))


def test_second_derivatives_are_refused() -> None:
    graph = ga.OperationGraph()
    x, doutput = (graph.tensor(uid=uid, dims=(3,), dtype="float64") for uid in (1, 2))
    (first,) = graph.gradient(x * x * x, doutput, (x,))
    (second,) = graph.gradient(first * 2.0, doutput, (x,))
    graph.output(second, uid=3)
    with pytest.raises(ga.Unsupported, match="second derivatives") as caught, ga.open_context("mock") as ctx:
        ctx.cudnn.execute(graph, {1: np.ones(3), 2: np.ones(3)}).result(30.0)
    assert caught.value.field == "gradient_4"


def test_a_gradient_may_be_used_further() -> None:
    graph = ga.OperationGraph()
    x, doutput = (graph.tensor(uid=uid, dims=(3,), dtype="float64") for uid in (1, 2))
    (first,) = graph.gradient(x * x * x, doutput, (x,))
    graph.output(graph.reduction(first * first, "sum"), uid=3)
    result = evaluate_graph(graph, {1: np.arange(3.0), 2: np.ones(3)})
    np.testing.assert_allclose(result[3], [(3.0**2 + 12.0**2)])
