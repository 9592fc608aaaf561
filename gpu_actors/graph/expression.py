"""Expression: a pointwise subgraph as the formula of one element, from which derivatives and CUDA are made.

Leaves are the scaled product ("score"), the incoming gradient ("dscore"), the element's indices, elements of tensors,
scalars and literals. Integers have 32 bits in kernels, so each integer has a range of possible values. An integer that
could exceed 32 bits, or float32's exact integers when it becomes a float, is refused before anything is compiled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gpu_actors.errors import Unsupported

__all__ = ["Expression", "Kind", "Range", "combine", "in_order", "leaf", "literal", "real"]

Kind: TypeAlias = Literal["real", "int", "bool"]
Range: TypeAlias = "tuple[int, int]"

FULL: Range = (-(1 << 31), (1 << 31) - 1)
_EXACT = 1 << 24  # up to here a float32 holds every integer
_MAKES_BOOL = frozenset(("gt", "ge", "lt", "le", "eq", "ne", "logical_and", "logical_or", "logical_not"))


@dataclass(frozen=True, slots=True, eq=False)
class Expression:
    """One node of an expression.

    op: an operation of `gpu_actors.graph.ops`, or score, dscore, index, tensor, scalar, literal, cast, sign, cdf,
        density.
    kind: the kind of the value.
    args: the arguments.
    slot: the number of a leaf's axis, tensor or scalar.
    value: the value of a literal.
    range: the least and the largest value of an int.
    """

    op: str
    kind: Kind
    args: tuple[Expression, ...] = ()
    slot: int = 0
    value: float = 0.0
    range: Range = FULL


def leaf(op: str, kind: Kind, slot: int = 0, range: Range = FULL) -> Expression:
    return Expression(op, kind, (), slot, 0.0, range)


def literal(value: float) -> Expression:
    return Expression("literal", "real", value=value)


def real(node: str, expression: Expression) -> Expression:
    """The expression as a floating-point number. Raises `Unsupported` if float32 cannot hold all its integers."""
    if expression.kind == "real":
        return expression
    if max(map(abs, expression.range)) > _EXACT:
        reason = "turns integers beyond 2^24 into floats, which do not hold them all"
        raise Unsupported(node, f"integers from {expression.range[0]} to {expression.range[1]}", reason, "int32 alone")
    return Expression("cast", "real", (expression,))


def combine(node: str, op: str, args: tuple[Expression, ...]) -> Expression:
    """An operation on expressions, with its kind and range. node: the name of the graph's node, for messages."""
    if op in ("logical_and", "logical_or", "logical_not"):
        return Expression(op, "bool", args)
    numbers = args[1:] if op == "select" else args
    integral = op in _INTEGRAL and all(number.kind == "int" for number in numbers)
    if not integral:
        numbers = tuple(real(node, number) for number in numbers)
    args = (args[0], *numbers) if op == "select" else numbers
    if op in _MAKES_BOOL:
        return Expression(op, "bool", args)
    if not integral:
        return Expression(op, "real", args)
    return Expression(op, "int", args, range=_checked_range(node, op, numbers))


def _checked_range(node: str, op: str, args: tuple[Expression, ...]) -> Range:
    if op in ("mod", "floordiv") and args[1].range[0] <= 0 <= args[1].range[1]:
        reason = "divides integers by what could be 0: give the divisor as a constant"
        raise Unsupported(node, op, reason, "a constant")
    ranges = [arg.range for arg in args]
    low, high = _range(op, ranges)
    if op == "mod":  # the kernel divides, and -2^31 / -1 does not fit int32
        quotient = _range("floordiv", ranges)
        low, high = min(low, quotient[0]), max(high, quotient[1])
    if low < FULL[0] or high > FULL[1]:
        reason = f"could reach {low if low < FULL[0] else high}, and kernels have 32-bit integers"
        raise Unsupported(node, op, reason, "constants, or float32")
    return _range(op, ranges)


def _range(op: str, ranges: list[Range]) -> Range:
    if op in ("select", "add", "sub", "mul", "max", "min", "floordiv", "mod"):
        (a, b), (c, d) = ranges
        match op:
            case "select":
                return min(a, c), max(b, d)
            case "add":
                return a + c, b + d
            case "sub":
                return a - d, b - c
            case "max":
                return max(a, c), max(b, d)
            case "min":
                return min(a, c), min(b, d)
            case "mod":
                return min(0, c + 1), max(0, d - 1)
        ends = [x * y if op == "mul" else x // y for x in (a, b) for y in (c, d)]
        if op == "floordiv":  # the divisor is never 0, so its range lies on one side of 0
            ends += [x // y for x in (a, b) for y in (-1, 1) if c <= y <= d]
        return min(ends), max(ends)
    ((a, b),) = ranges
    if op == "neg":
        return -b, -a
    return (0 if a <= 0 <= b else min(abs(a), abs(b))), max(abs(a), abs(b))


_INTEGRAL = frozenset(
    (*("select", "add", "sub", "mul", "max", "min", "floordiv", "mod", "neg", "abs"), *_MAKES_BOOL),
)


def in_order(roots: Iterable[Expression]) -> list[Expression]:
    """Every expression in the roots, each once and after its arguments."""
    order: list[Expression] = []
    done: set[int] = set()
    stack = [(root, False) for root in reversed(list(roots))]
    while stack:
        expression, ready = stack.pop()
        if id(expression) in done:
            continue
        if ready:
            done.add(id(expression))
            order.append(expression)
        else:
            stack.append((expression, True))
            stack += [(arg, False) for arg in reversed(expression.args)]
    return order
