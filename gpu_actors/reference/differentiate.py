"""Reverse-mode differentiation of a graph over the values that its evaluation recorded.

Griewank and Walther, "Evaluating Derivatives", 2nd ed., section 3.2: from the output back, each node turns gradients of
its outputs into gradients of its inputs. Conditions, indices and roundings have no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from gpu_actors.graph.ops import POINTWISE, Node, row_stats
from gpu_actors.reference.tape import Array, Tape, erf, keep_factors, listed_of, seen_product, visible_of

__all__ = ["gradients"]

Found: TypeAlias = "Sequence[Array | None]"
"""The gradient of each operand of a node, or None for an operand without one."""


def gradients(tape: Tape, node: Node) -> list[Array]:
    """The results of a gradient node: the gradients of sum(output * doutput) by the tensors of ``wrt``."""
    output, doutput = node.inputs[:2]
    known: dict[int, Array] = {output: tape.values[doutput]}
    pairs: dict[int, Array] = {}
    for passed in reversed(tape.graph.order().nodes):
        written = [known.get(uid) for uid in passed.outputs]
        if passed.op == "gradient" or all(gradient is None for gradient in written):
            continue
        values = [tape.values[uid] for uid in passed.inputs]
        visible = _visible_pairs(tape, passed, pairs.get(passed.outputs[0]))
        found: Found
        if passed.op == "matmul":
            found, visible = _matmul(tape, passed, written, values, visible), None
        else:
            found = _RULES[passed.op](tape, passed, written, *values)
        for uid, value, gradient in zip(passed.inputs, values, found, strict=True):
            if gradient is None or value.dtype.kind != "f":
                continue
            if visible is not None:
                gradient = np.where(visible, gradient, 0.0)
            gradient = tape.step(_unbroadcast(gradient, value.shape))
            reached = visible if visible is not None and value.shape[-2:] == visible.shape else None
            _add_pairs(pairs, uid, reached, uid in known)
            known[uid] = gradient if uid not in known else tape.step(known[uid] + gradient)
    return [known.get(uid, np.zeros_like(tape.values[uid])) for uid in node["wrt"]]


def _visible_pairs(tape: Tape, node: Node, behind: Array | None) -> Array | None:
    """(rows, keys): the pairs that have a gradient in a node's operands, or None if no pair is hidden.

    behind: the pairs that have a gradient in the node's result. Pairs that a mask before the softmax hides have none,
    even if they are NaN.
    """
    if node.op == "mask" and any(reader.op == "softmax" for reader in tape.graph.order().readers[node.outputs[0]]):
        return tape.masked[node.outputs[0]]
    return behind if node.op in POINTWISE or node.op == "matmul" else None


def _add_pairs(pairs: dict[int, Array], uid: int, reached: Array | None, known: bool) -> None:
    """Note which pairs of a tensor have a gradient. known: whether an earlier reader gave it one; then both count."""
    if known and (uid not in pairs or reached is None):
        pairs.pop(uid, None)
    elif reached is not None:
        pairs[uid] = reached | pairs[uid] if known else reached


def _unbroadcast(gradient: Array, shape: tuple[int, ...]) -> Array:
    """The gradient summed over broadcast axes. Heads that share a KV head (GQA) are summed in their groups."""
    gradient = gradient.sum(axis=tuple(range(gradient.ndim - len(shape))))
    for axis, extent in enumerate(shape):
        if gradient.shape[axis] == extent:
            continue
        groups = (*gradient.shape[:axis], extent, -1, *gradient.shape[axis + 1 :])
        gradient = gradient.reshape(groups).sum(axis=axis + 1)
    return gradient


def _one(rule: Callable[..., Array]) -> Callable[..., Found]:
    """A rule for one operand. rule: maps (gradient, operand, result) to the operand's gradient."""

    def apply(tape: Tape, node: Node, written: list[Array | None], a: Array) -> Found:
        return (rule(written[0], a.astype(tape.dtype, copy=False), tape.values[node.outputs[0]]),)

    return apply


def _two(rule: Callable[..., tuple[Array | None, Array | None]]) -> Callable[..., Found]:
    """A rule for two operands. rule: maps (gradient, a, b) to the gradients of a and b."""

    def apply(tape: Tape, node: Node, written: list[Array | None], a: Array, b: Array) -> Found:
        return rule(written[0], a.astype(tape.dtype, copy=False), b.astype(tape.dtype, copy=False))

    return apply


def _matmul(
    tape: Tape, node: Node, written: list[Array | None], values: list[Array], visible: Array | None
) -> tuple[Array, Array]:
    """The rule of a product. visible: if it has rows and keys, the pairs that have a gradient in it."""
    (gradient,), (a, b) = written, values
    assert gradient is not None
    if a.ndim == 4 and b.shape[1] not in (1, a.shape[1]) and a.shape[1] != 1:
        b = np.repeat(b, a.shape[1] // b.shape[1], axis=1)
    da = seen_product(gradient, b.swapaxes(-1, -2), visible)
    if visible is not None:
        return da, seen_product(gradient.swapaxes(-1, -2), a, visible.T).swapaxes(-1, -2)
    weighed = tape.seen.get(node.inputs[0])
    if weighed is not None:
        da = np.where(weighed, da, 0.0)
    return da, seen_product(a.swapaxes(-1, -2), gradient, None if weighed is None else weighed.T)


def _softmax(tape: Tape, node: Node, written: list[Array | None], scores: Array) -> Found:
    weights = tape.values[node.outputs[0]]
    total = np.zeros_like(weights)
    if written[0] is not None:
        total += weights * (written[0] - (weights * written[0]).sum(axis=-1, keepdims=True))
    into = dict(zip(row_stats(node), written[1:], strict=True))
    uids = dict(zip(row_stats(node), node.outputs[1:], strict=True))
    if (gradient := into.get("stats")) is not None:
        total += weights * gradient
    into_max = into.get("score_max")
    if (gradient := into.get("score_sum_exp")) is not None:
        moved = gradient * tape.values[uids["score_sum_exp"]]
        total += weights * moved
        into_max = -moved if into_max is None else into_max - moved
    if into_max is not None:
        chosen = (scores == scores.max(axis=-1, keepdims=True)) & ~np.isneginf(scores)
        total += chosen * (into_max / np.maximum(1, chosen.sum(axis=-1, keepdims=True)))
    return (total,)


def _dropout(tape: Tape, node: Node, written: list[Array | None], weights: Array, *seed: Array) -> Found:
    return (written[0] * keep_factors(tape, node), *(None for _ in seed))


def _mask(tape: Tape, node: Node, written: list[Array | None], scores: Array) -> Found:
    return (np.where(visible_of(node, scores.shape), np.asarray(written[0]), 0.0),)


def _block_mask(tape: Tape, node: Node, written: list[Array | None], scores: Array, *lists: Array) -> Found:
    gradient = np.where(listed_of(node, scores.shape, lists), np.asarray(written[0]), 0.0)
    return gradient, *(None for _ in lists)


def _select(tape: Tape, node: Node, written: list[Array | None], condition: Array, a: Array, b: Array) -> Found:
    gradient = np.asarray(written[0])
    return None, np.where(condition, gradient, 0.0), np.where(condition, 0.0, gradient)


def _reduction(tape: Tape, node: Node, written: list[Array | None], a: Array) -> Found:
    gradient = np.broadcast_to(np.asarray(written[0]), a.shape)
    if node["kind"] == "sum":
        return (gradient,)
    result = tape.values[node.outputs[0]]
    if node["kind"] == "mean":
        return (gradient * (result.size / a.size),)
    chosen = a == result
    return (gradient * chosen / chosen.sum(axis=node["axes"], keepdims=True),)


def _none(tape: Tape, node: Node, written: list[Array | None], *operands: Array) -> Found:
    return tuple(None for _ in operands)


def _dgelu(x: Array) -> Array:
    density = np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
    result: Array = 0.5 * (1.0 + erf(x * math.sqrt(0.5))) + x * density
    return result


_RULES: dict[str, Callable[..., Found]] = {
    "transpose": _one(lambda g, a, y: g.swapaxes(-1, -2)),
    "softmax": _softmax,
    "dropout": _dropout,
    "mask": _mask,
    "block_mask": _block_mask,
    "select": _select,
    "reduction": _reduction,
    "add": _two(lambda g, a, b: (g, g)),
    "sub": _two(lambda g, a, b: (g, -g)),
    "mul": _two(lambda g, a, b: (g * b, g * a)),
    "div": _two(lambda g, a, b: (g / b, -g * a / (b * b))),
    "mod": _two(lambda g, a, b: (g, -g * np.floor_divide(a, b))),
    "max": _two(lambda g, a, b: (np.where(a >= b, g, 0.0), np.where(a >= b, 0.0, g))),
    "min": _two(lambda g, a, b: (np.where(a <= b, g, 0.0), np.where(a <= b, 0.0, g))),
    "neg": _one(lambda g, a, y: -g),
    "abs": _one(lambda g, a, y: g * np.sign(a)),
    "exp": _one(lambda g, a, y: g * y),
    "log": _one(lambda g, a, y: g / a),
    "sqrt": _one(lambda g, a, y: g / (2.0 * y)),
    "sin": _one(lambda g, a, y: g * np.cos(a)),
    "cos": _one(lambda g, a, y: -g * np.sin(a)),
    "tan": _one(lambda g, a, y: g * (1.0 + y * y)),
    "tanh": _one(lambda g, a, y: g * (1.0 - y * y)),
    "sigmoid": _one(lambda g, a, y: g * y * (1.0 - y)),
    "gelu": _one(lambda g, a, y: g * _dgelu(a)),
    **dict.fromkeys(
        ("floor", "floordiv", "index", "gt", "ge", "lt", "le", "eq", "ne"),
        _none,
    ),
    **dict.fromkeys(("logical_and", "logical_or", "logical_not"), _none),
}
