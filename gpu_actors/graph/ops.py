"""The operations of a graph: how many tensors each reads, and the dims and dtype of its results.

Dims broadcast as in NumPy. Arithmetic on floats is float32 inside a graph, or float64 if an operand is float64. On
integers it is int32, except for division. Comparisons and logic return bool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from gpu_actors.attention.key_mask import Alignment
from gpu_actors.attention.mha import Mask
from gpu_actors.errors import InvalidRequest
from gpu_actors.fields import expect, flag, one_of, real
from gpu_actors.graph.tensor import GraphTensor

__all__ = ["POINTWISE", "ROW_STATS", "UNARY", "Node", "infer", "row_stats"]

ARITHMETIC = ("add", "sub", "mul", "div", "max", "min", "mod", "floordiv")
COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")
LOGIC = ("logical_and", "logical_or")
_SAME_KIND = ("neg", "abs")  # integers remain integers
UNARY = (*_SAME_KIND, "exp", "log", "sqrt", "sin", "cos", "tan", "tanh", "sigmoid", "gelu", "floor", "logical_not")
POINTWISE = (*UNARY, *ARITHMETIC, *COMPARISONS, *LOGIC, "select", "index", "mask")
REDUCTIONS = ("sum", "mean", "max", "min")
ROW_STATS = ("stats", "score_max", "score_sum_exp")


@dataclass(frozen=True, slots=True)
class Node:
    """One operation.

    inputs, outputs: uids.
    attributes: everything else that the result depends on, ordered by name.
    seed: the seed of a dropout if it is no tensor. It is data, so it is no attribute and in no signature.
    """

    name: str
    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attributes: tuple[tuple[str, Any], ...] = ()
    seed: int = 0

    def __getitem__(self, attribute: str) -> Any:
        for name, value in self.attributes:
            if name == attribute:
                return value
        raise InvalidRequest(self.name, attribute, f"is an attribute that {self.op} needs")


class Written(NamedTuple):
    dims: tuple[int, ...]
    dtype: str


def infer(node: Node, tensors: Sequence[GraphTensor]) -> list[Written]:
    """The dims and dtype of each output of a node that reads ``tensors``."""
    operation = OPERATIONS.get(node.op)
    if operation is None:
        raise InvalidRequest(node.name, node.op, f"is no operation; there are {', '.join(sorted(OPERATIONS))}")
    allowed = _ATTRIBUTES.get(node.op, ())
    for name, _ in node.attributes:
        takes = f"it takes {', '.join(allowed)}" if allowed else "it takes none"
        expect(name in allowed, node.name, name, f"is no attribute of {node.op}: {takes}")
    return operation(node, tensors)


def broadcast(node: Node, tensors: Sequence[GraphTensor]) -> tuple[int, ...]:
    rank = max(len(tensor.dims) for tensor in tensors)
    dims: list[int] = []
    for axis in range(-rank, 0):
        extents = {tensor.dims[axis] for tensor in tensors if len(tensor.dims) >= -axis} - {1}
        if len(extents) > 1:
            raise _mismatch(node, tensors, "must have equal dims, or 1 to be broadcast")
        dims.append(extents.pop() if extents else 1)
    return tuple(dims)


def _mismatch(node: Node, tensors: Sequence[GraphTensor], reason: str) -> InvalidRequest:
    operands = ", ".join(f"{tensor.dtype}{list(tensor.dims)}" for tensor in tensors)
    return InvalidRequest(node.name, operands, f"the operands of {node.op} {reason}")


def _arity(node: Node, tensors: Sequence[GraphTensor], reads: int, writes: int = 1) -> None:
    if len(tensors) != reads or len(node.outputs) != writes:
        counts = f"{len(tensors)} and {len(node.outputs)}"
        raise InvalidRequest(node.name, counts, f"{node.op} reads {reads} tensors and writes {writes}")


def _float(node: Node, tensors: Sequence[GraphTensor]) -> str:
    for tensor in tensors:
        if tensor.dtype == "bool":
            raise _mismatch(node, tensors, "must be numbers; turn a condition into numbers with select")
    return "float64" if any(tensor.dtype == "float64" for tensor in tensors) else "float32"


def _number(node: Node, tensors: Sequence[GraphTensor]) -> str:
    dtype = _float(node, tensors)
    return "int32" if all(tensor.dtype == "int32" for tensor in tensors) else dtype


def _unary(node: Node, tensors: Sequence[GraphTensor]) -> list[Written]:
    _arity(node, tensors, 1)
    if node.op == "logical_not":
        return [Written(tensors[0].dims, _bool(node, tensors))]
    dtype = _number(node, tensors) if node.op in _SAME_KIND else _float(node, tensors)
    return [Written(tensors[0].dims, dtype)]


def _binary(node: Node, tensors: Sequence[GraphTensor]) -> list[Written]:
    _arity(node, tensors, 2)
    dtype = _float(node, tensors) if node.op == "div" else _number(node, tensors)
    if dtype == "int32" and node.op in ("mod", "floordiv"):
        expect(tensors[1].value != 0, node.name, 0, f"the divisor of an integer {node.op} must not be 0")
    return [Written(broadcast(node, tensors), dtype)]


def _comparison(node: Node, tensors: Sequence[GraphTensor]) -> list[Written]:
    _arity(node, tensors, 2)
    _number(node, tensors)
    return [Written(broadcast(node, tensors), "bool")]


def _bool(node: Node, tensors: Sequence[GraphTensor]) -> str:
    if any(tensor.dtype != "bool" for tensor in tensors):
        raise _mismatch(node, tensors, "must be bool, as comparisons give")
    return "bool"


def _logic(node: Node, tensors: Sequence[GraphTensor]) -> list[Written]:
    _arity(node, tensors, 2)
    return [Written(broadcast(node, tensors), _bool(node, tensors))]


def _select(node: Node, tensors: Sequence[GraphTensor]) -> list[Written]:
    _arity(node, tensors, 3)
    if tensors[0].dtype != "bool":
        raise _mismatch(node, tensors, "must begin with the condition, a bool")
    if flag(f"{node.name} mask_mod", dict(node.attributes).get("mask_mod", False)):
        hidden = tensors[2].value
        expect(tensors[2].by_value and hidden == -math.inf, node.name, hidden, "a mask_mod must hide by -inf")
    return [Written(broadcast(node, tensors), _number(node, tensors[1:]))]


def _index(node: Node, tensors: Sequence[GraphTensor]) -> list[Written]:
    _arity(node, tensors, 1)
    rank, axis = len(tensors[0].dims), node["axis"]
    if isinstance(axis, bool) or not isinstance(axis, int) or not -rank <= axis < rank:
        raise InvalidRequest(node.name, axis, f"axis must be an int from {-rank} to {rank - 1}")
    dims = tuple(extent if n == axis % rank else 1 for n, extent in enumerate(tensors[0].dims))
    return [Written(dims, "int32")]


def _mask(node: Node, tensors: Sequence[GraphTensor]) -> list[Written]:
    _arity(node, tensors, 1)
    if len(tensors[0].dims) < 2:
        raise _mismatch(node, tensors, "must have rows and keys as their last dims")
    expect(Mask(node["kind"], node["width"]).kind != "none", node.name, "none", "must hide something")
    one_of(node.name, node["alignment"], get_args(Alignment))
    return [Written(tensors[0].dims, _float(node, tensors))]


def _block_mask(node: Node, tensors: Sequence[GraphTensor]) -> list[Written]:
    _arity(node, tensors, len(tensors))
    dims = tensors[0].dims
    if len(dims) != 4:
        raise _mismatch(node, tensors[:1], "must begin with scores (batch, heads, rows, keys)")
    size, transposed = node["block_size"], flag(f"{node.name} transposed", node["transposed"])
    sound = isinstance(size, tuple) and len(size) == 2 and all(type(extent) is int and extent > 0 for extent in size)
    expect(sound, node.name, size, "block_size must be two positive ints, rows and keys of a block")
    sets = len(tensors[1:]) // (4 if transposed else 2)
    expect(
        sets in (1, 2) and len(tensors) == 1 + sets * (4 if transposed else 2),
        node.name,
        len(tensors),
        "must read scores, and counts and indices of the lists",
    )
    blocks = tuple(-(-extent // step) for extent, step in zip(dims[2:], size, strict=True))
    for n, tensor in enumerate(tensors[1:]):
        along = blocks if n < 2 * sets else blocks[::-1]
        extents = along[:1] if n % 2 == 0 else along
        outer = len(tensor.dims) >= 2 and tensor.dims[0] in (1, dims[0]) and tensor.dims[1] in (1, dims[1])
        if tensor.dtype != "int32" or not outer or tensor.dims[2:] != extents or tensor.by_value:
            reason = f"must have lists of int32 (1 or {dims[0]}, 1 or {dims[1]}, {', '.join(map(str, extents))})"
            raise _mismatch(node, [tensor], reason)
    return [Written(dims, _float(node, tensors[:1]))]


def _transpose(node: Node, tensors: Sequence[GraphTensor]) -> list[Written]:
    _arity(node, tensors, 1)
    dims = tensors[0].dims
    if len(dims) < 2:
        raise _mismatch(node, tensors, "must have two dims to exchange")
    return [Written((*dims[:-2], dims[-1], dims[-2]), tensors[0].dtype)]


def _matmul(node: Node, tensors: Sequence[GraphTensor]) -> list[Written]:
    _arity(node, tensors, 2)
    a, b = (tensor.dims for tensor in tensors)
    if len(a) < 2 or len(a) != len(b):
        raise _mismatch(node, tensors, "must have the same number of dims, at least 2")
    if a[-1] != b[-2]:
        hint = ": transpose the second, as in graph.matmul(q, graph.transpose(k))" if a[-1] == b[-1] else ""
        raise _mismatch(node, tensors, f"must agree in the dim that is summed, {a[-1]} and {b[-2]}{hint}")
    outer: list[int] = []
    for axis, (extent, other) in enumerate(zip(a[:-2], b[:-2], strict=True)):
        shared = axis == 1 and len(a) == 4 and extent % other == 0  # GQA: heads of q share heads of k and v
        if extent != other and 1 not in (extent, other) and not shared:
            raise _mismatch(node, tensors, "must have equal outer dims, 1 to be broadcast, or fewer heads that divide")
        outer.append(max(extent, other))
    return [Written((*outer, a[-2], b[-1]), _float(node, tensors))]


def _reduction(node: Node, tensors: Sequence[GraphTensor]) -> list[Written]:
    _arity(node, tensors, 1)
    one_of(node.name, node["kind"], REDUCTIONS, f"a reduction is one of {', '.join(REDUCTIONS)}")
    rank, axes = len(tensors[0].dims), node["axes"]
    sound = isinstance(axes, tuple) and axes and all(type(axis) is int and -rank <= axis < rank for axis in axes)
    if not sound:
        raise InvalidRequest(node.name, axes, f"axes must be ints from {-rank} to {rank - 1}")
    reduced = {axis % rank for axis in axes}
    expect(len(reduced) == len(axes), node.name, axes, "axes must differ")
    dims = tuple(1 if axis in reduced else extent for axis, extent in enumerate(tensors[0].dims))
    return [Written(dims, _float(node, tensors))]


def row_stats(node: Node) -> tuple[str, ...]:
    """The statistics of `ROW_STATS` that a softmax writes after its weights, in the node's order."""
    default = ("stats",) if len(node.outputs) == 2 else ()
    stats: tuple[str, ...] = dict(node.attributes).get("rows", default)
    return stats


def _softmax(node: Node, tensors: Sequence[GraphTensor]) -> list[Written]:
    rows = row_stats(node)
    sound = isinstance(rows, tuple) and all(isinstance(name, str) and name in ROW_STATS for name in rows)
    expect(sound and len(set(rows)) == len(rows), node.name, rows, f"rows must be different ones of {ROW_STATS}")
    _arity(node, tensors, 1, 1 + len(rows))
    dims, dtype = tensors[0].dims, _float(node, tensors)
    return [Written(dims, dtype), *(Written((*dims[:-1], 1), dtype) for _ in rows)]


def _dropout(node: Node, tensors: Sequence[GraphTensor]) -> list[Written]:
    _arity(node, tensors, 2 if len(tensors) == 2 else 1)
    if len(tensors[0].dims) != 4:
        raise _mismatch(node, tensors, "must be (batch, heads, rows, keys): draws are counted along them")
    probability = real(node.name, node["probability"], "a probability in [0, 1)")
    expect(0 <= probability < 1, node.name, probability, "must be a probability in [0, 1)")
    if len(tensors) == 2 and (not tensors[1].by_value or tensors[1].dtype != "uint64"):
        raise _mismatch(node, tensors, "must end with the seed, a scalar of uint64 that is passed by value")
    return [Written(tensors[0].dims, _float(node, tensors[:1]))]


def _gradient(node: Node, tensors: Sequence[GraphTensor]) -> list[Written]:
    wrt, forward = node["wrt"], node["forward"]
    for name, uids in (("wrt", wrt), ("forward", forward)):
        expect(isinstance(uids, tuple), node.name, uids, f"{name} must be a tuple of uids")
    expect(len(forward) in (0, 2), node.name, forward, "forward must be (output, stats) or nothing")
    flag(f"{node.name} deterministic", dict(node.attributes).get("deterministic", False))
    count, named = len(wrt), wrt + forward
    expect(node.inputs[2:] == named, node.name, node.inputs, f"must read output, its gradient and {named}")
    expect(len(set(wrt)) == len(wrt), node.name, wrt, "must be differentiated by each tensor once")
    _arity(node, tensors, 2 + len(named), count)
    output = tensors[0].dims
    if output != tensors[1].dims:
        raise _mismatch(node, tensors[:2], "must be an output and its gradient, of equal dims")
    if forward and [tensor.dims for tensor in tensors[-2:]] != [output, (*output[:-1], 1)]:
        raise _mismatch(node, tensors[-2:], f"that forward gave must have dims {output} and {(*output[:-1], 1)}")
    for tensor in tensors[2 : 2 + count]:
        if not tensor.is_float or tensor.by_value:
            raise _mismatch(node, [tensor], "must be differentiated by tensors of floats")
    return [Written(tensor.dims, _float(node, [tensor])) for tensor in tensors[2 : 2 + count]]


# The attributes of each operation. Others are refused.
_ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "index": ("axis",),
    "select": ("mask_mod",),
    "mask": ("kind", "width", "alignment"),
    "block_mask": ("block_size", "transposed"),
    "reduction": ("kind", "axes"),
    "softmax": ("rows",),
    "dropout": ("probability",),
    "gradient": ("wrt", "forward", "deterministic"),
}

Operation = Callable[[Node, Sequence[GraphTensor]], list[Written]]
OPERATIONS: Mapping[str, Operation] = {
    **dict.fromkeys(UNARY, _unary),
    **dict.fromkeys(ARITHMETIC, _binary),
    **dict.fromkeys(COMPARISONS, _comparison),
    **dict.fromkeys(LOGIC, _logic),
    "select": _select,
    "index": _index,
    "mask": _mask,
    "block_mask": _block_mask,
    "transpose": _transpose,
    "matmul": _matmul,
    "reduction": _reduction,
    "softmax": _softmax,
    "dropout": _dropout,
    "gradient": _gradient,
}
