"""Numbers of graphs at the edges of their types, against Python's arithmetic or formulas written here."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gpu_actors as ga
from gpu_actors.graph.match import match_attention

Q, K, V, OUT, A, B = 1, 2, 3, 4, 5, 6
DIMS, SCORES = (1, 1, 16, 32), (1, 1, 16, 16)

Condition = Callable[[ga.OperationGraph, ga.GraphTensor, ga.GraphTensor], ga.GraphTensor]


def computed(ctx: ga.GpuContext, op: str, a: Any, b: Any) -> Any:
    """The result of a binary operation on arrays of one dtype."""
    graph = ga.OperationGraph()
    operands = (graph.tensor(uid=n, dims=x.shape, dtype=x.dtype.name) for n, x in ((A, a), (B, b)))
    graph.output(getattr(graph, op)(*operands), uid=OUT)
    return ctx.cudnn.execute(graph, {A: a, B: b}).result(10.0)[OUT]


def test_remainders_and_quotients_are_pythons(mock: ga.GpuContext) -> None:
    """Also with an infinite divisor, and with a quotient of more digits than a float has."""
    a = np.array([5.0, -5.0, 1e17, -1e17, 7.5, 1e300, -1e-20, 0.0])
    b = np.array([math.inf, math.inf, 3.0, 3.0, -2.0, 7.0, 1.0, 4.0])
    pairs = list(zip(a.tolist(), b.tolist(), strict=True))
    np.testing.assert_array_equal(computed(mock, "mod", a, b), [x % y for x, y in pairs])
    np.testing.assert_array_equal(computed(mock, "floordiv", a, b), [x // y for x, y in pairs])


def test_sums_of_integers_are_floats(mock: ga.GpuContext) -> None:
    graph = ga.OperationGraph()
    counts, divisors = (graph.tensor(uid=n, dims=(2, 3), dtype="int32") for n in (A, B))
    total = graph.reduction(counts, "sum")
    graph.output(total // divisors, uid=OUT)
    inputs = {A: np.full((2, 3), 7, np.int32), B: np.array([[0, 2, -4], [1, 0, 5]], np.int32)}
    result = mock.cudnn.execute(graph, inputs).result(10.0)[OUT]
    np.testing.assert_array_equal(result, [[math.inf, 10, -6], [21, math.inf, 4]])


@pytest.mark.parametrize(
    ("op", "a", "b", "at_fault"),
    [
        ("mul", 1 << 30, 4, 1 << 32),
        ("add", -(1 << 31), -1, -(1 << 31) - 1),
        ("floordiv", -(1 << 31), -1, 1 << 31),
        ("floordiv", 7, 0, 0),
        ("mod", 7, 0, 0),
    ],
)
def test_integers_that_leave_their_bits_are_refused(
    mock: ga.GpuContext, op: str, a: int, b: int, at_fault: int
) -> None:
    with pytest.raises(ga.InvalidRequest) as refused:
        computed(mock, op, np.array([3, a], np.int32), np.array([5, b], np.int32))
    assert (refused.value.field, refused.value.value) == (f"{op}_0", at_fault)


def test_integers_inside_a_graph_have_64_bits(mock: ga.GpuContext) -> None:
    graph = ga.OperationGraph()
    a = graph.tensor(uid=A, dims=(2,), dtype="int32")
    square = a * a
    graph.output(square // a, uid=OUT)
    array = np.array([3, 1 - (1 << 31)], np.int32)
    np.testing.assert_array_equal(mock.cudnn.execute(graph, {A: array}).result(10.0)[OUT], array)
    graph.output(graph.gt(square * a, 0), uid=OUT + 10)
    with pytest.raises(ga.InvalidRequest, match="leaves 64 bits") as refused:
        mock.cudnn.execute(graph, {A: array}).result(10.0)
    assert (refused.value.field, refused.value.value) == ("mul_2", ((1 << 31) - 1) ** 3)


def test_a_remainder_that_divides_beyond_32_bits_is_refused_by_kernels() -> None:
    graph = attention(lambda graph, a, b: graph.eq(a % -1, b), "int32")
    with pytest.raises(ga.Unsupported, match="could reach 2147483648"):
        match_attention(graph)


def test_a_softmax_of_weights_knows_no_mask(mock: ga.GpuContext) -> None:
    """The weights of hidden keys are zeros, which the second softmax takes as any other number."""
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((2, 3, 4))
    graph = ga.OperationGraph()
    a = graph.tensor(uid=A, dims=scores.shape, dtype="float64")
    graph.output(graph.softmax(graph.softmax(graph.mask(a, ga.Mask.causal()))), uid=OUT)
    result = mock.cudnn.execute(graph, {A: scores}).result(10.0)[OUT]
    once = softmax(np.where(np.tri(3, 4, dtype=bool), scores, -np.inf))
    np.testing.assert_allclose(result, softmax(once), rtol=1e-14)


def softmax(x: Any) -> Any:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attention(condition: Condition, dtype: str) -> ga.OperationGraph:
    """Attention to key 0 and the keys for which a condition on two tensors of the scores' shape holds."""
    graph = ga.OperationGraph()
    q, k, v = (graph.tensor(uid=n, dims=DIMS, dtype="float32") for n in (Q, K, V))
    a, b = (graph.tensor(uid=n, dims=SCORES, dtype=dtype) for n in (A, B))
    scores = graph.matmul(q, graph.transpose(k)) * 0.25
    shown = condition(graph, a, b) | graph.eq(graph.index(scores, 3), 0)
    graph.output(graph.matmul(graph.softmax(graph.select(shown, scores, -np.inf)), v), uid=OUT, dtype="float32")
    return graph


def check_attention(ctx: ga.GpuContext, condition: Condition, a: Any, b: Any, shown: Any) -> None:
    rng = np.random.default_rng(1)
    arrays = {n: rng.standard_normal(DIMS).astype(np.float32) for n in (Q, K, V)}
    q, k, v = (array.astype(np.float64) for array in arrays.values())
    shown = shown | (np.arange(16) == 0)
    assert 0.2 < shown.mean() < 0.9
    expected = softmax(np.where(shown, q @ k.swapaxes(-1, -2) * 0.25, -np.inf)) @ v
    result = ctx.cudnn.execute(attention(condition, a.dtype.name), arrays | {A: a, B: b}).result(60.0)[OUT]
    np.testing.assert_allclose(result, expected, atol=1e-5)


def test_conditions_on_float64_are_float64_in_kernels(emulated: ga.GpuContext) -> None:
    """The operands differ by less than float32 resolves."""
    rng = np.random.default_rng(2)
    a = rng.standard_normal(SCORES)
    b = a + rng.choice([-1e-10, 1e-10], SCORES)
    check_attention(emulated, lambda graph, x, y: graph.gt(x, y), a, b, a > b)


def test_remainders_and_quotients_are_pythons_in_kernels(emulated: ga.GpuContext) -> None:
    rng = np.random.default_rng(3)
    a = np.float32(rng.choice([1e8, -1e8, 5.0, -5.0, 7.5, 12.0], SCORES))
    b = np.float32(rng.choice([3.0, -3.0, 7.0, math.inf, -math.inf, 2.5], SCORES))
    pairs = list(zip(a.ravel().tolist(), b.ravel().tolist(), strict=True))
    rest, quotient = (np.reshape(each, SCORES) for each in ([x % y for x, y in pairs], [x // y for x, y in pairs]))
    large = rest >= 1.5

    def shown(graph: ga.OperationGraph, x: ga.GraphTensor, y: ga.GraphTensor) -> ga.GraphTensor:
        one, other = graph.ge(x % y, 1.5), graph.ge(x // y, -0.5)
        return (one & other) | ~(one | other)

    check_attention(emulated, shown, a, b, np.where(large, quotient >= -0.5, quotient < -0.5))
