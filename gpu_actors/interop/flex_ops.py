"""Lowering: turns a traced score_mod's or mask_mod's ATen operations on scalars into those of an OperationGraph.

A place is the position (b, h, q_idx, kv_idx) of a score. Torch computes values that depend on neither the score nor its
place. It also computes an index into such a tensor, for every place at once. The result becomes a tensor beside the
scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.graph.graph import OperationGraph
from gpu_actors.graph.tensor import GraphTensor

__all__ = ["Lowering"]

aten = torch.ops.aten
# Reads a tensor of four axes beside the scores: (name of the node that reads it, its maker, whether ints need bounds).
Read = Callable[[str, Callable[[], torch.Tensor], bool], GraphTensor]


class Lowering:
    """Adds the operations of one function to a graph.

    name: "score_mod" or "mask_mod". inputs: the graph's tensors for the function's arguments, in their order.
    dims: the shape of the scores.
    """

    def __init__(
        self,
        name: str,
        traced: torch.fx.GraphModule,
        graph: OperationGraph,
        inputs: tuple[GraphTensor, ...],
        dims: tuple[int, ...],
        device: torch.device,
        read: Read,
    ) -> None:
        self._name = name
        self._traced = traced
        self._graph = graph
        self._read = read
        arguments = [node for node in traced.graph.nodes if node.op == "placeholder"]
        self._values: dict[Any, Any] = dict(zip(arguments, inputs, strict=True))
        self._everywhere: dict[Any, torch.Tensor] = {}
        for axis, node in enumerate(arguments[-4:]):
            shape = [extent if n == axis else 1 for n, extent in enumerate(dims)]
            self._everywhere[node] = torch.arange(dims[axis], device=device).reshape(shape)
        self._score = arguments[0] if len(arguments) == 5 else None
        self._of_score = {self._score}
        for node in traced.graph.nodes:
            if any(before in self._of_score for before in node.all_input_nodes):
                self._of_score.add(node)

    def result(self) -> Any:
        """What the function returns: a tensor of the graph, or a number. Raises what `flex_attention` raises."""
        returned = self._returned()
        return self.value(returned) if isinstance(returned, torch.fx.Node) else returned

    @property
    def depends_on_score(self) -> bool:
        """Whether the function's result depends on its score."""
        return self._returned() in self._of_score

    def conjuncts(self) -> list[Any]:
        """The nodes whose logical AND is the function's result."""
        found: list[Any] = []
        waiting = [self._returned()]
        while waiting:
            node = waiting.pop()
            if isinstance(node, torch.fx.Node) and node.target in _AND:
                waiting += reversed(node.args)
            else:
                found.append(node)
        return found

    def is_causal(self, node: Any) -> bool:
        """Whether a node says that a row sees no later keys."""
        if not isinstance(node, torch.fx.Node) or len(node.args) != 2:
            return False
        row, key = list(self._everywhere)[2:4]
        return (node.target is aten.ge.Tensor and node.args == (row, key)) or (
            node.target is aten.le.Tensor and node.args == (key, row)
        )

    def value(self, node: Any) -> Any:
        """The value of a node: a tensor of the graph, or a number."""
        for before in self._needed_by(node):
            if before not in self._values:
                self._values[before] = self._lowered(before)
        return self.operand(node, self._values[node])

    def operand(self, node: Any, value: Any) -> Any:
        """A value as an operand: a torch tensor becomes a tensor beside the scores."""
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim():
            raise self._refused(node, f"gives a tensor of shape {tuple(value.shape)}, not a scalar", "t[b, h, q_idx]")
        made = lambda: _narrow(self._fault(node), value.reshape(1, 1, 1, 1))  # noqa: E731
        return self._read(node.name, made, not _only_compared(node))

    def _returned(self) -> Any:
        return next(node for node in self._traced.graph.nodes if node.op == "output").args[0]

    def _lowered(self, node: Any) -> Any:
        if node.op == "get_attr":
            return getattr(self._traced, node.target)
        if node.target in _CONSTANT:
            return _CONSTANT[node.target](node)
        values = [self._values[before] for before in node.all_input_nodes]
        if not any(isinstance(value, GraphTensor) for value in values) and any(
            isinstance(value, torch.Tensor) for value in values
        ):
            return self._computed(node, self._values)
        if node.target is aten.index.Tensor:
            return self._indexed(node)
        operation = _OPERATIONS.get(node.target)
        if operation is None:
            raise self._refused(node, "is no operation of a graph", "arithmetic, comparisons, where, tanh, exp")
        args = torch.fx.node.map_arg(node.args, lambda before: self.operand(before, self._values[before]))
        kwargs = torch.fx.node.map_arg(node.kwargs, lambda before: self.operand(before, self._values[before]))
        try:
            return operation(self._graph, *args, **kwargs)
        except _Refusal as refusal:
            raise self._refused(node, *refusal.args) from None
        except (InvalidRequest, Unsupported) as error:
            raise self._refused(node, error.reason, None) from error

    def _computed(self, node: Any, values: Mapping[Any, Any]) -> Any:
        args, kwargs = (torch.fx.node.map_arg(each, values.__getitem__) for each in (node.args, node.kwargs))
        try:
            return node.target(*args, **kwargs)
        except (IndexError, RuntimeError) as error:
            raise InvalidRequest(self._fault(node), str(node.target), str(error)) from error

    def _indexed(self, node: Any) -> GraphTensor:
        source = self._values[node.args[0]]
        if isinstance(source, GraphTensor):
            raise self._refused(node, "reads from what depends on the place", "a captured tensor")
        if node.meta["val"].dim():
            shape = tuple(node.meta["val"].shape)
            raise self._refused(node, f"leaves axes of {shape}: index all axes in one []", "t[b, h, q_idx]")
        if node in self._of_score:
            raise self._refused(node, "reads at an index that depends on the score", "an index of the place")

        def read() -> torch.Tensor:
            found = self._at_every_place(node)
            return _narrow(self._fault(node), found.reshape((1,) * (4 - found.dim()) + tuple(found.shape)))

        return self._read(node.name, read, not _only_compared(node))

    def _at_every_place(self, node: Any) -> torch.Tensor:
        for before in self._needed_by(node):
            if before not in self._everywhere:
                known = getattr(self._traced, before.target) if before.op == "get_attr" else None
                self._everywhere[before] = self._computed(before, self._everywhere) if known is None else known
        return self._everywhere[node]

    def _needed_by(self, node: Any) -> list[Any]:
        """A node and all nodes before it that it needs, in order. Not recursive: they may outnumber Python's frames."""
        needed = {node}
        for before in reversed(self._traced.graph.nodes):
            if before in needed:
                needed.update(before.all_input_nodes)
        return [before for before in self._traced.graph.nodes if before in needed]

    def _fault(self, node: Any) -> str:
        return f"{self._name} at {place}" if (place := node.meta.get("place")) else self._name

    def _refused(self, node: Any, reason: str, nearest: str | None) -> Unsupported:
        shown = node.target if isinstance(node.target, str) else str(node.target).removesuffix(".default")
        return Unsupported(self._fault(node), shown, reason, nearest)


def _only_compared(node: Any) -> bool:
    """Whether a node's integers are only compared with integers, and not used in arithmetic."""
    beside = [arg.meta["val"] for user in node.users for arg in user.args if isinstance(arg, torch.fx.Node)]
    return all(user.target in _COMPARISONS for user in node.users) and not any(x.is_floating_point() for x in beside)


def _narrow(fault: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype that graphs have: integers become int32."""
    if tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.dtype == torch.int32:
        return tensor
    if tensor.is_complex():
        raise Unsupported(fault, str(tensor.dtype), "graphs have real numbers", "float32")
    if tensor.dtype == torch.int64 and bool((tensor != tensor.to(torch.int32)).any()):
        raise Unsupported(fault, "torch.int64", "holds integers beyond 32 bits", "int32")
    return tensor.to(torch.int32)


# Operations: functions from (graph, operands) to a tensor of the graph or a number


class _Refusal(Exception):
    """An operation cannot be lowered: (reason, nearest)."""


def _number(graph: OperationGraph, x: Any) -> Any:
    """A condition as 1 or 0, as in torch's arithmetic; another value as it is."""
    if isinstance(x, bool):
        return int(x)
    return graph.select(x, 1, 0) if isinstance(x, GraphTensor) and x.dtype == "bool" else x


def _condition(graph: OperationGraph, x: Any) -> Any:
    if isinstance(x, bool | int | float):
        return bool(x)
    return x if x.dtype == "bool" else graph.ne(x, 0)


def _plain(op: str) -> Callable[..., Any]:
    def operation(graph: OperationGraph, *operands: Any, alpha: float = 1) -> Any:
        numbers = [_number(graph, operand) for operand in operands]
        if alpha != 1:
            numbers[1] = numbers[1] * alpha
        return graph.operate(op, numbers)

    return operation


def _reversed(op: str) -> Callable[..., Any]:
    forward = _plain(op)

    def operation(graph: OperationGraph, a: Any, b: Any, alpha: float = 1) -> Any:
        return forward(graph, b, _number(graph, a) * alpha if alpha != 1 else a)

    return operation


def _and(graph: OperationGraph, a: Any, b: Any) -> Any:
    a, b = _condition(graph, a), _condition(graph, b)
    if isinstance(a, bool):
        return b if a else False
    if isinstance(b, bool):
        return a if b else False
    return graph.logical_and(a, b)


def _not(graph: OperationGraph, a: Any) -> Any:
    a = _condition(graph, a)
    return not a if isinstance(a, bool) else graph.logical_not(a)


def _or(graph: OperationGraph, a: Any, b: Any) -> Any:
    a, b = _condition(graph, a), _condition(graph, b)
    if isinstance(a, bool):
        return True if a else b
    if isinstance(b, bool):
        return True if b else a
    return graph.logical_or(a, b)


def _xor(graph: OperationGraph, a: Any, b: Any) -> Any:
    return _or(graph, _and(graph, a, _not(graph, b)), _and(graph, _not(graph, a), b))


def _bitwise(operation: Callable[..., Any]) -> Callable[..., Any]:
    def checked(graph: OperationGraph, *operands: Any) -> Any:
        if not all(isinstance(x, bool) or (isinstance(x, GraphTensor) and x.dtype == "bool") for x in operands):
            raise _Refusal("computes with the bits of integers", "a comparison, // or %")
        return operation(graph, *operands)

    return checked


def _where(graph: OperationGraph, condition: Any, a: Any, b: Any) -> Any:
    condition = _condition(graph, condition)
    if isinstance(condition, bool):
        return a if condition else b
    logic = [isinstance(x, bool) or (isinstance(x, GraphTensor) and x.dtype == "bool") for x in (a, b)]
    if all(logic):
        return _or(graph, _and(graph, condition, a), _and(graph, _not(graph, condition), b))
    return graph.select(condition, _number(graph, a), _number(graph, b))


def _division(graph: OperationGraph, a: Any, b: Any, rounding_mode: str | None = None) -> Any:
    a, b = _number(graph, a), _number(graph, b)
    if rounding_mode == "trunc":
        raise _Refusal("rounds towards 0", 'rounding_mode="floor"')
    return graph.div(a, b) if rounding_mode is None else graph.floordiv(a, b)


def _clamp(graph: OperationGraph, x: Any, min: Any = None, max: Any = None) -> Any:
    x = x if min is None else graph.max(x, min)
    return x if max is None else graph.min(x, max)


def _pow(graph: OperationGraph, x: Any, exponent: Any) -> Any:
    if isinstance(exponent, int | float) and exponent in (1, 2, 3, 4):
        made = x
        for _ in range(int(exponent) - 1):
            made = graph.mul(made, x)
        return made
    if exponent == 0.5:
        return graph.sqrt(x)
    if exponent in (-1, -0.5):
        return graph.div(1.0, x if exponent == -1 else graph.sqrt(x))
    raise _Refusal(f"has no exponent {exponent!r}", "1, 2, 3, 4, 0.5, -0.5 or -1")


def _gelu(graph: OperationGraph, x: Any, approximate: str = "none") -> Any:
    if approximate != "none":
        raise _Refusal(f"is approximated by {approximate}", 'approximate="none"')
    return graph.gelu(x)


def _cast(graph: OperationGraph, x: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    if dtype is None:
        return x
    if dtype == torch.bool:
        return _condition(graph, x)
    was_float = isinstance(x, float) or (isinstance(x, GraphTensor) and x.is_float)
    if dtype in (torch.float32, torch.float64):
        return x if was_float else graph.mul(_number(graph, x), 1.0)
    if dtype in (torch.int32, torch.int64) and not was_float:
        return _number(graph, x)
    raise _Refusal(f"rounds to {dtype}, and floats inside a graph are float32", "torch.float32 and torch.floor")


def _filled(value: Any, node: Any) -> Any:
    """A constant as a bool, float or int, according to the dtype that torch gives it."""
    dtype = node.meta["val"].dtype
    return bool(value) if dtype == torch.bool else float(value) if dtype.is_floating_point else int(value)


_COMPARISONS = {
    getattr(getattr(aten, op), overload): _plain(op)
    for op in ("gt", "ge", "lt", "le", "eq", "ne")
    for overload in ("Tensor", "Scalar")
}
_SAME = (aten.alias.default, aten.detach.default, aten.clone.default, aten.lift_fresh_copy.default)
_AND = (aten.logical_and.default, aten.bitwise_and.Tensor)
_CONSTANT: Mapping[Any, Callable[[Any], Any]] = {
    aten.scalar_tensor.default: lambda node: _filled(node.args[0], node),
    aten.full.default: lambda node: _filled(node.args[1], node),
    aten.full_like.default: lambda node: _filled(node.args[1], node),
    aten.new_full.default: lambda node: _filled(node.args[2], node),
    **{op.default: lambda node: _filled(1, node) for op in (aten.ones, aten.ones_like, aten.new_ones)},
    **{op.default: lambda node: _filled(0, node) for op in (aten.zeros, aten.zeros_like, aten.new_zeros)},
}
_OPERATIONS: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys(_SAME, lambda graph, x, **_: x),
    **{
        getattr(getattr(aten, name), overload): _plain(op)
        for name, op in {"add": "add", "sub": "sub", "mul": "mul", "remainder": "mod"}.items()
        for overload in ("Tensor", "Scalar")
    },
    **_COMPARISONS,
    **{
        getattr(aten, op).default: _plain(op)
        for op in ("neg", "abs", "exp", "log", "sqrt", "sin", "cos", "tan", "tanh", "sigmoid", "floor")
    },
    aten.remainder.Scalar_Tensor: _plain("mod"),
    aten.rsub.Scalar: _reversed("sub"),
    aten.rsub.Tensor: _reversed("sub"),
    aten.div.Tensor: _division,
    aten.div.Scalar: _division,
    aten.div.Tensor_mode: _division,
    aten.div.Scalar_mode: _division,
    aten.floor_divide.default: _plain("floordiv"),
    aten.floor_divide.Scalar: _plain("floordiv"),
    aten.maximum.default: _plain("max"),
    aten.minimum.default: _plain("min"),
    aten.clamp.default: _clamp,
    aten.clamp.Tensor: _clamp,
    aten.clamp_min.default: lambda graph, x, low: graph.max(x, low),
    aten.clamp_max.default: lambda graph, x, high: graph.min(x, high),
    aten.relu.default: lambda graph, x: graph.max(x, 0.0),
    aten.square.default: lambda graph, x: graph.mul(x, x),
    aten.reciprocal.default: lambda graph, x: graph.div(1.0, x),
    aten.rsqrt.default: lambda graph, x: graph.div(1.0, graph.sqrt(x)),
    aten.exp2.default: lambda graph, x: graph.exp(graph.mul(x, math.log(2))),
    aten.log2.default: lambda graph, x: graph.mul(graph.log(x), 1 / math.log(2)),
    aten.pow.Tensor_Scalar: _pow,
    aten.gelu.default: _gelu,
    aten.where.self: _where,
    aten._to_copy.default: _cast,
    aten.logical_and.default: _and,
    aten.logical_or.default: _or,
    aten.logical_xor.default: _xor,
    aten.logical_not.default: _not,
    aten.bitwise_and.Tensor: _bitwise(_and),
    aten.bitwise_or.Tensor: _bitwise(_or),
    aten.bitwise_xor.Tensor: _bitwise(_xor),
    aten.bitwise_not.default: _bitwise(_not),
    aten.bitwise_and.Scalar: _bitwise(_and),
    aten.bitwise_or.Scalar: _bitwise(_or),
    aten.bitwise_xor.Scalar: _bitwise(_xor),
}
