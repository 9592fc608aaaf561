"""Ranges of integers in modifications: no value lies outside the range that an expression states."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpu_actors as ga
from gpu_actors.graph.expression import Expression, combine, in_order, leaf, literal, real

BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "max": max,
    "min": min,
    "mod": lambda a, b: a % b,
    "floordiv": lambda a, b: a // b,
}
UNARY = {"neg": lambda a: -a, "abs": abs}
RANGES = st.tuples(st.integers(-9, 9), st.integers(-9, 9)).map(lambda pair: (min(pair), max(pair)))


def integer(low: int, high: int) -> Expression:
    return leaf("scalar", "int", 0, (low, high))


def values(bounds: tuple[int, int]) -> range:
    return range(bounds[0], bounds[1] + 1)


@given(st.sampled_from(sorted(BINARY)), RANGES, RANGES)
def test_the_range_of_two_integers_holds_every_result(op: str, a: tuple[int, int], b: tuple[int, int]) -> None:
    if op in ("mod", "floordiv") and b[0] <= 0 <= b[1]:
        with pytest.raises(ga.Unsupported, match="could be 0"):
            combine("node", op, (integer(*a), integer(*b)))
        return
    low, high = combine("node", op, (integer(*a), integer(*b))).range
    results = [BINARY[op](x, y) for x, y in itertools.product(values(a), values(b))]
    assert low <= min(results)
    assert max(results) <= high
    if op not in ("mod",):  # the bounds of a remainder are the divisor's
        assert (low, high) == (min(results), max(results))


@given(st.sampled_from(sorted(UNARY)), RANGES)
def test_the_range_of_one_integer_holds_every_result(op: str, a: tuple[int, int]) -> None:
    results = [UNARY[op](x) for x in values(a)]
    assert combine("node", op, (integer(*a),)).range == (min(results), max(results))


def test_what_could_leave_32_bits_is_refused() -> None:
    most = integer(0, (1 << 31) - 1)
    assert combine("node", "add", (most, integer(0, 0))).range == (0, (1 << 31) - 1)
    for op, args in {
        "add": (most, integer(0, 1)),
        "mul": (most, integer(0, 2)),
        "neg": (leaf("tensor", "int"),),
    }.items():
        with pytest.raises(ga.Unsupported, match="32-bit integers") as caught:
            combine("node", op, args)
        assert caught.value.field == "node"


def test_what_float32_does_not_hold_is_refused() -> None:
    assert real("node", integer(-(1 << 24), 1 << 24)).op == "cast"
    with pytest.raises(ga.Unsupported, match=r"beyond 2\^24"):
        real("node", integer(0, (1 << 24) + 1))
    with pytest.raises(ga.Unsupported, match=r"beyond 2\^24"):
        combine("node", "mul", (leaf("score", "real"), leaf("tensor", "int")))


def test_integers_meet_as_integers_and_become_floats_beside_floats() -> None:
    i, j, s = integer(0, 5), integer(0, 5), leaf("score", "real")
    assert combine("node", "lt", (i, j)).args == (i, j)
    mixed = combine("node", "lt", (i, s))
    assert (mixed.kind, mixed.args[0].op, mixed.args[1]) == ("bool", "cast", s)
    assert combine("node", "div", (i, j)).kind == "real"
    condition = combine("node", "le", (i, j))
    assert combine("node", "select", (condition, i, j)).range == (0, 5)
    assert combine("node", "select", (condition, i, s)).kind == "real"


def test_shared_expressions_are_computed_once() -> None:
    s = leaf("score", "real")
    square = combine("node", "mul", (s, s))
    total = combine("node", "add", (square, combine("node", "neg", (square,))))
    order = in_order((total, literal(1.0)))
    assert len(order) == 5
    assert order.index(square) < order.index(total)
