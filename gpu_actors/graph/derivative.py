"""The derivative of a score modification, in reverse mode over its expression.

The result is an expression of `dscore`, the gradient of the modified score. The rules and their source are those of
`gpu_actors.reference.differentiate`.
"""

from __future__ import annotations

from collections.abc import Callable

from gpu_actors.graph.expression import Expression, in_order, leaf, literal

__all__ = ["derivative"]

Adjoints = tuple["Expression | None", ...]


def derivative(root: Expression, score: Expression) -> Expression:
    """d(root)/d(score) * dscore. score: the leaf "score" in root."""
    order = in_order((root,))
    depends = {id(score)}
    for expression in order:
        if expression.kind == "real" and any(id(arg) in depends for arg in expression.args):
            depends.add(id(expression))
    adjoints: dict[int, Expression] = {}
    if id(root) in depends:
        adjoints[id(root)] = leaf("dscore", "real")
    for expression in reversed(order):
        adjoint = adjoints.get(id(expression))
        if adjoint is None or not expression.args or expression.op not in _RULES:
            continue
        for arg, gradient in zip(
            expression.args, _RULES[expression.op](adjoint, expression, *expression.args), strict=True
        ):
            if gradient is not None and id(arg) in depends:
                total = adjoints.get(id(arg))
                adjoints[id(arg)] = gradient if total is None else _add(total, gradient)
    return adjoints.get(id(score), literal(0.0))


def _op(op: str, *args: Expression) -> Expression:
    return Expression(op, "real", args)


def _add(a: Expression, b: Expression) -> Expression:
    return _op("add", a, b)


def _mul(a: Expression, b: Expression) -> Expression:
    return _op("mul", a, b)


def _where(condition: Expression, a: Expression, b: Expression) -> Expression:
    return Expression("select", "real", (condition, a, b))


def _test(op: str, a: Expression, b: Expression) -> Expression:
    return Expression(op, "bool", (a, b))


_ZERO, _ONE, _TWO = literal(0.0), literal(1.0), literal(2.0)


def _div(g: Expression, y: Expression, a: Expression, b: Expression) -> Adjoints:
    # y = a / b: d/db is -y / b.
    share = _op("div", g, b)
    return share, _op("neg", _mul(share, y))


def _mod(g: Expression, y: Expression, a: Expression, b: Expression) -> Adjoints:
    return g, _op("neg", _mul(g, _op("floordiv", a, b)))


def _max(g: Expression, y: Expression, a: Expression, b: Expression) -> Adjoints:
    first = _test("ge", a, b)
    return _where(first, g, _ZERO), _where(first, _ZERO, g)


def _min(g: Expression, y: Expression, a: Expression, b: Expression) -> Adjoints:
    first = _test("le", a, b)
    return _where(first, g, _ZERO), _where(first, _ZERO, g)


def _gelu(g: Expression, y: Expression, a: Expression) -> Adjoints:
    return (_mul(g, _add(_op("cdf", a), _mul(a, _op("density", a)))),)


def _select(g: Expression, y: Expression, condition: Expression, a: Expression, b: Expression) -> Adjoints:
    return None, _where(condition, g, _ZERO), _where(condition, _ZERO, g)


# Each rule maps (gradient of the result, the result, its arguments) to the gradients of the arguments.
_RULES: dict[str, Callable[..., Adjoints]] = {
    "add": lambda g, y, a, b: (g, g),
    "sub": lambda g, y, a, b: (g, _op("neg", g)),
    "mul": lambda g, y, a, b: (_mul(g, b), _mul(g, a)),
    "div": _div,
    "mod": _mod,
    "max": _max,
    "min": _min,
    "select": _select,
    "neg": lambda g, y, a: (_op("neg", g),),
    "abs": lambda g, y, a: (_mul(g, _op("sign", a)),),
    "exp": lambda g, y, a: (_mul(g, y),),
    "log": lambda g, y, a: (_op("div", g, a),),
    "sqrt": lambda g, y, a: (_op("div", g, _mul(_TWO, y)),),
    "sin": lambda g, y, a: (_mul(g, _op("cos", a)),),
    "cos": lambda g, y, a: (_op("neg", _mul(g, _op("sin", a))),),
    "tan": lambda g, y, a: (_mul(g, _add(_ONE, _mul(y, y))),),
    "tanh": lambda g, y, a: (_mul(g, _op("sub", _ONE, _mul(y, y))),),
    "sigmoid": lambda g, y, a: (_mul(_mul(g, y), _op("sub", _ONE, y)),),
    "gelu": _gelu,
}
