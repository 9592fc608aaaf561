"""The operations of score modifications against NumPy, and the numbers that kernels pass to them."""

from __future__ import annotations

from typing import Any

import numpy as np
from emulated.score_probe import run_probe
from inside.reference import evaluate_graph

import gpu_actors as ga
from gpu_actors.graph.modification import ScoreInputs

DIMS = (2, 2, 6, 5)
SCORE, TENSOR, OTHER, RESULT = 1, 2, 3, 4


def every_operation(g: ga.OperationGraph, s: Any, t: Any, u: Any) -> Any:
    """A sum of every operation, in which no term hides another's error."""
    b, h, i, j = (g.index(s, axis) for axis in range(4))
    floats = g.gelu(s) + g.sigmoid(s * t) + g.max(s, t) * 2.0 - g.min(s, u) + abs(s) * 0.3 + s % 0.7 + (s // 0.9) * 0.2
    angles = g.sin(s * 1.3) + g.cos(s * t) * 0.7 - g.tan(g.tanh(u + s)) * 0.4
    smooth = (
        angles + g.sqrt(0.5 + s * s) + g.log(1.5 + abs(s)) + g.exp(-abs(s)) - g.tanh(s / 3.0) + g.floor(3.0 * s) * 0.1
    )
    integers = ((i - 3) // 2) * 0.11 + ((i - 3) // -2) * 0.05 + ((i - j) % 3) * 0.23 + abs(i - j) * 0.07
    places = g.select((i <= j) & ~g.eq(h, 1) | (b > 0), integers + 0.5 * b + 0.25 * h, integers * s)
    return floats + angles + smooth + places


def test_every_operation_and_its_slope_are_numpys() -> None:
    graph = ga.OperationGraph()
    s = graph.tensor(uid=SCORE, dims=DIMS, dtype="float64")
    t = graph.tensor(uid=TENSOR, dims=(2, 1, 6, 1), dtype="float64")
    u = graph.tensor(uid=OTHER, dims=(1, 2, 1, 5), dtype="float64")
    result = graph.output(every_operation(graph, s, t, u), uid=RESULT)
    rng = np.random.default_rng(0)
    values = {uid: rng.standard_normal(graph.tensors[uid].dims) for uid in (SCORE, TENSOR, OTHER)}
    modification = ScoreInputs(graph, SCORE, DIMS).modification(RESULT)
    dscore = rng.standard_normal(DIMS)
    value, gradient = run_probe(modification, values, values[SCORE], dscore)
    (ds,) = graph.gradient(result, graph.tensor(uid=90, dims=DIMS, dtype="float64"), (s,))
    graph.output(ds, uid=91)
    expected = evaluate_graph(graph, {**values, 90: dscore})
    np.testing.assert_allclose(value, expected[RESULT], rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(gradient, expected[91], rtol=1e-11, atol=1e-11)


def test_a_nan_on_either_side_of_a_maximum_or_minimum_is_the_result() -> None:
    for operation in ("max", "min"):
        graph = ga.OperationGraph()
        s, t = (graph.tensor(uid=uid, dims=DIMS, dtype="float64") for uid in (SCORE, TENSOR))
        graph.output(getattr(graph, operation)(s, t), uid=RESULT)
        values = {uid: np.random.default_rng(uid).standard_normal(DIMS) for uid in (SCORE, TENSOR)}
        values[SCORE][0, 0, 0] = values[TENSOR][0, 0, 1] = np.nan
        modification = ScoreInputs(graph, SCORE, DIMS).modification(RESULT)
        value, _ = run_probe(modification, values, values[SCORE], values[SCORE])
        np.testing.assert_array_equal(value, evaluate_graph(graph, values)[RESULT])


def test_angles_in_float32_are_reduced_up_to_2_to_the_24() -> None:
    """Sine and cosine are within 4e-7 of NumPy's in float64; the tangent's bound grows with its slope."""
    rng = np.random.default_rng(0)
    scores = (rng.uniform(-1, 1, DIMS) * 2.0 ** rng.uniform(-10, 24, DIMS)).astype(np.float32)
    scores[0, 0, 0] = np.float32(0.0), np.float32(np.pi), np.float32(-np.pi / 2), 2.0**24, -(2.0**23) + 1
    for operation in ("sin", "cos", "tan"):
        graph = ga.OperationGraph()
        s = graph.tensor(uid=SCORE, dims=DIMS, dtype="float32")
        graph.output(getattr(graph, operation)(s), uid=RESULT)
        modification = ScoreInputs(graph, SCORE, DIMS).modification(RESULT)
        value, gradient = run_probe(modification, {SCORE: scores}, scores, np.ones(DIMS))
        exact = scores.astype(np.float64)
        values = {"sin": np.sin(exact), "cos": np.cos(exact), "tan": np.tan(exact)}
        slopes = {"sin": np.cos(exact), "cos": -np.sin(exact), "tan": 1 + np.tan(exact) ** 2}
        room = 4e-7 * slopes["tan"] if operation == "tan" else 4e-7
        assert (abs(value - values[operation]) <= room).all(), operation
        if operation != "tan":
            assert (abs(gradient - slopes[operation]) <= room).all(), operation
