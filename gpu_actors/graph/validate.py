"""Validation of a graph, and the topological order of its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.graph.ops import Node, infer
from gpu_actors.graph.tensor import FLOATS, GraphTensor

__all__ = ["Order", "validate"]


@dataclass(frozen=True, slots=True)
class Order:
    """A sound graph in topological order.

    writers: the node that writes a tensor, by uid.
    readers: the nodes that read a tensor, by uid.
    inputs, outputs: uids of the arguments and results of `execute`.
    scalars: uids of scalars whose values `execute` gets.
    """

    nodes: tuple[Node, ...]
    writers: dict[int, Node]
    readers: dict[int, tuple[Node, ...]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scalars: tuple[int, ...]


def validate(tensors: Mapping[int, GraphTensor], nodes: Sequence[Node]) -> Order:
    writers = _writers(tensors, nodes)
    readers: dict[int, list[Node]] = {}
    for node in nodes:
        for uid in node.inputs:
            readers.setdefault(uid, []).append(node)
    for tensor in tensors.values():
        _check_role(tensor, writers.get(tensor.uid), readers.get(tensor.uid, []))
    order = _sorted(nodes, writers)
    for node in order:
        _check_written(tensors, node)
        _check_first(node, writers)
    outputs = tuple(t.uid for t in tensors.values() if t.uid in writers and not t.virtual)
    if not outputs:
        raise InvalidRequest("graph", f"{len(order)} nodes", "gives nothing: name a result with graph.output")
    return Order(
        nodes=order,
        writers=writers,
        readers={uid: tuple(nodes_of_uid) for uid, nodes_of_uid in readers.items()},
        inputs=tuple(t.uid for t in tensors.values() if t.uid not in writers and not t.by_value),
        outputs=outputs,
        scalars=tuple(t.uid for t in tensors.values() if t.by_value and t.value is None),
    )


def _writers(tensors: Mapping[int, GraphTensor], nodes: Sequence[Node]) -> dict[int, Node]:
    writers: dict[int, Node] = {}
    for name, count in Counter(node.name for node in nodes).items():
        if count > 1:
            raise InvalidRequest(name, count, "names several nodes: each needs a name of its own")
    for node in nodes:
        for uid in (*node.inputs, *node.outputs):
            if uid not in tensors:
                raise InvalidRequest(node.name, uid, "names a tensor that the graph does not have")
        for uid in node.outputs:
            if uid in writers:
                raise InvalidRequest(node.name, uid, f"writes a tensor that {writers[uid].name} writes already")
            if tensors[uid].by_value:
                raise InvalidRequest(node.name, uid, "writes a scalar that is passed by value")
            writers[uid] = node
    return writers


def _check_role(tensor: GraphTensor, writer: Node | None, readers: list[Node]) -> None:
    field = f"tensor {tensor.uid}"
    if writer is None and not readers:
        raise InvalidRequest(field, repr(tensor), "is neither read nor written by a node")
    if tensor.virtual and writer is None:
        raise InvalidRequest(field, repr(tensor), f"is virtual, and no node writes it, but {readers[0].name} reads it")
    if tensor.virtual and not readers:
        reason = "is virtual and no node reads it: name it with graph.output, or leave it out"
        raise InvalidRequest(field, repr(tensor), reason)


def _sorted(nodes: Sequence[Node], writers: dict[int, Node]) -> tuple[Node, ...]:
    """Sort depth first, in the order in which nodes were added. It does not recurse, because graphs may be long."""
    done: dict[str, bool] = {}  # False while a node's operands are being sorted
    order: list[Node] = []
    for root in nodes:
        stack = [root]
        while stack:
            node = stack[-1]
            if node.name not in done:
                done[node.name] = False
                for uid in reversed(node.inputs):
                    writer = writers.get(uid)
                    if writer is None or done.get(writer.name):
                        continue
                    if writer.name in done:
                        raise InvalidRequest(writer.name, writer.op, "depends on its own result: the graph has a cycle")
                    stack.append(writer)
                continue
            stack.pop()
            if not done[node.name]:
                done[node.name] = True
                order.append(node)
    return tuple(order)


def _check_written(tensors: Mapping[int, GraphTensor], node: Node) -> None:
    written = infer(node, [tensors[uid] for uid in node.inputs])
    for uid, (dims, dtype) in zip(node.outputs, written, strict=True):
        tensor = tensors[uid]
        if tensor.dims != dims:
            raise InvalidRequest(node.name, tensor.dims, f"writes {dims}, which tensor {uid} must have as dims")
        floats = tensor.dtype in FLOATS and dtype in FLOATS
        # Virtual tensors have one precision: kernels keep them in registers, without rounding to a narrower dtype.
        if tensor.dtype != dtype and (tensor.virtual or not floats):
            raise InvalidRequest(node.name, tensor.dtype, f"writes {dtype}, which tensor {uid} must have as dtype")


def _check_first(node: Node, writers: dict[int, Node]) -> None:
    """Refuse a gradient whose output depends on another gradient."""
    visited: set[int] = set()
    waiting = [node.inputs[0]] if node.op == "gradient" else []
    while waiting:
        uid = waiting.pop()
        writer = writers.get(uid)
        if writer is None or uid in visited:
            continue
        visited.add(uid)
        if writer.op == "gradient":
            reason = f"differentiates what {writer.name} gave, and second derivatives are not computed"
            raise Unsupported(node.name, writer.name, reason, "a first derivative")
        waiting += writer.inputs
