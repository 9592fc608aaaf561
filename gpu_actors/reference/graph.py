"""Computes a graph with NumPy, operation by operation. The mock device answers so, and kernels are compared with it.

Floats are float64 (float32 if `MockOptions` says so), integers int64, and intermediate results are not rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpu_actors.fields import expect
from gpu_actors.graph.ops import Node, row_stats
from gpu_actors.graph.tensor import FLOATS, INT32_MAX
from gpu_actors.reference.differentiate import gradients
from gpu_actors.reference.tape import Array, Tape, erf, keep_factors, listed_of, seen_product, visible_of

if TYPE_CHECKING:
    from gpu_actors.graph.graph import OperationGraph

__all__ = ["evaluate_graph", "record"]

Values: TypeAlias = Mapping[int, Any]

_FURTHEST = 1 << 62  # the sum of two integers below it fits 64 bits


def evaluate_graph(graph: OperationGraph, values: Values, dtype: npt.DTypeLike = np.float64) -> dict[int, Array]:
    """The outputs of a sound graph by uid, in ``dtype`` and not yet rounded to their own dtypes.

    values: by uid, the array of every input, and the number of every scalar whose value the graph does not know.
    """
    tape = record(graph, values, dtype)
    return {uid: tape.values[uid] for uid in graph.order().outputs}


def record(
    graph: OperationGraph,
    values: Values,
    dtype: npt.DTypeLike = np.float64,
    step: Callable[[Array], Array] = lambda array: array,
) -> Tape:
    tape = Tape(graph, dtype, step)
    for uid, tensor in graph.tensors.items():
        if tensor.by_value:
            number = values[uid] if tensor.value is None else tensor.value
            tape.values[uid] = np.asarray(number, _dtype_of(tensor.dtype, dtype))
        elif uid in values:
            array = np.asarray(values[uid]).astype(_dtype_of(tensor.dtype, dtype))
            tape.values[uid] = step(array) if tensor.dtype in FLOATS else array
    with np.errstate(all="ignore"):
        for node in graph.order().nodes:
            _compute(tape, node)
    return tape


def _dtype_of(name: str, floats: npt.DTypeLike) -> npt.DTypeLike:
    if name in FLOATS:
        return floats
    return {"int32": np.int64, "uint64": np.uint64, "bool": np.bool_}[name]


def _compute(tape: Tape, node: Node) -> None:
    if node.op == "gradient":
        found = gradients(tape, node)
        for uid, gradient in zip(node.outputs, found, strict=True):
            tape.values[uid] = tape.step(gradient)
        return
    operands = [tape.values[uid] for uid in node.inputs]
    results = _RULES[node.op](tape, node, *operands)
    for uid, result in zip(node.outputs, results if isinstance(results, tuple) else (results,), strict=True):
        array = np.asarray(result)
        if tape.graph.tensors[uid].dtype in FLOATS:  # also sums and products of integers
            tape.values[uid] = tape.step(array.astype(tape.dtype, copy=False))
        else:
            tape.values[uid] = _checked_integers(tape, node, uid, array)
    shown = {"softmax": tape.masked, "dropout": tape.seen}.get(node.op, {}).get(node.inputs[0])
    if shown is not None:
        tape.seen[node.outputs[0]] = shown


def _checked_integers(tape: Tape, node: Node, uid: int, array: Array) -> Array:
    """Check integers, which have 64 bits inside a graph and 32 bits in outputs. Raises InvalidRequest for overflow."""
    if array.dtype.kind == "i":
        ends = [int(array.min()), int(array.max())]
        if node.op == "mul":  # the product may have wrapped around already
            a, b = (tape.values[read] for read in node.inputs)
            most = int(np.abs(a).max()) * int(np.abs(b).max())
            ends = [most] if most >= _FURTHEST else ends
        virtual = tape.graph.tensors[uid].virtual
        bound, room = (_FURTHEST, "64 bits") if virtual else (INT32_MAX + 1, "the 32 bits of an int32 output")
        for value in ends:
            expect(-bound <= value < bound, node.name, value, f"leaves {room}")
    return array


def _gelu(x: Array) -> Array:
    result: Array = x * 0.5 * (1.0 + erf(x * math.sqrt(0.5)))
    return result


def _mask(tape: Tape, node: Node, scores: Array) -> Array:
    visible = visible_of(node, scores.shape)
    tape.masked[node.outputs[0]] = visible
    return np.where(visible, scores, -np.inf)


def _block_mask(tape: Tape, node: Node, scores: Array, *lists: Array) -> Array:
    return np.where(listed_of(node, scores.shape, lists), scores, -np.inf)


def _softmax(tape: Tape, node: Node, scores: Array) -> tuple[Array, ...]:
    largest = scores.max(axis=-1, keepdims=True)
    top = np.where(np.isneginf(largest), 0, largest).astype(scores.dtype)
    weights = np.exp(tape.step(scores - top))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    visible = tape.masked.get(node.inputs[0])
    if visible is not None:  # a row that sees a NaN is NaN, but weights of hidden keys stay 0
        weights = np.where(visible, weights, 0)
    rows = {
        "stats": top + np.log(total),
        "score_max": np.where(np.isnan(total), total, largest),
        "score_sum_exp": total,
    }
    return weights, *(rows[name] for name in row_stats(node))


def _dropout(tape: Tape, node: Node, weights: Array, *seed: Array) -> Array:
    result: Array = weights * keep_factors(tape, node)
    return result


def _matmul(tape: Tape, node: Node, a: Array, b: Array) -> Array:
    if a.ndim == 4 and b.shape[1] not in (1, a.shape[1]) and a.shape[1] != 1:
        b = np.repeat(b, a.shape[1] // b.shape[1], axis=1)
    return seen_product(a, b, tape.seen.get(node.inputs[0]))


def _reduction(tape: Tape, node: Node, a: Array) -> Array:
    result: Array = getattr(np, node["kind"])(a, axis=node["axes"], keepdims=True)
    return result


def _divided(function: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """NumPy's function, which agrees with Python's for quotients that no float holds and infinite divisors too."""

    def apply(tape: Tape, node: Node, *operands: Array) -> Array:
        a, b = _alike(tape, operands)
        sound = b.dtype.kind == "f" or bool(b.all())
        expect(sound, node.name, 0, f"the divisor of an integer {node.op} must not be 0")
        return function(a, b)

    return apply


def _index(tape: Tape, node: Node, like: Array) -> Array:
    axis = node["axis"] % like.ndim
    shape = tuple(extent if n == axis else 1 for n, extent in enumerate(like.shape))
    return np.arange(like.shape[axis]).reshape(shape)


def _floats(function: Callable[[Array], Array]) -> Callable[..., Array]:
    return lambda tape, node, a: function(a.astype(tape.dtype, copy=False))


def _plain(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda tape, node, *operands: function(*_alike(tape, operands))


def _alike(tape: Tape, operands: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands, with integers beside floats as floats of the computation's dtype, instead of NumPy's choice."""
    if all(operand.dtype.kind in "ib" for operand in operands):
        return operands
    return tuple(operand.astype(tape.dtype, copy=False) for operand in operands)


_RULES: dict[str, Callable[..., Any]] = {
    "matmul": _matmul,
    "transpose": lambda tape, node, a: a.swapaxes(-1, -2),
    "softmax": _softmax,
    "dropout": _dropout,
    "mask": _mask,
    "block_mask": _block_mask,
    "reduction": _reduction,
    "index": _index,
    "select": lambda tape, node, condition, a, b: np.where(condition, *_alike(tape, (a, b))),
    "div": lambda tape, node, a, b: a.astype(tape.dtype, copy=False) / b.astype(tape.dtype, copy=False),
    "add": _plain(np.add),
    "sub": _plain(np.subtract),
    "mul": _plain(np.multiply),
    "mod": _divided(np.mod),
    "floordiv": _divided(np.floor_divide),
    "max": _plain(np.maximum),
    "min": _plain(np.minimum),
    "neg": _plain(np.negative),
    "abs": _plain(np.abs),
    "exp": _floats(np.exp),
    "log": _floats(np.log),
    "sqrt": _floats(np.sqrt),
    "sin": _floats(np.sin),
    "cos": _floats(np.cos),
    "tan": _floats(np.tan),
    "tanh": _floats(np.tanh),
    "sigmoid": _floats(lambda x: 1.0 / (1.0 + np.exp(-x))),
    "gelu": _floats(_gelu),
    "floor": _floats(np.floor),
    "gt": _plain(np.greater),
    "ge": _plain(np.greater_equal),
    "lt": _plain(np.less),
    "le": _plain(np.less_equal),
    "eq": _plain(np.equal),
    "ne": _plain(np.not_equal),
    "logical_and": _plain(np.logical_and),
    "logical_or": _plain(np.logical_or),
    "logical_not": _plain(np.logical_not),
}
