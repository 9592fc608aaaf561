"""The signature of a graph: equal for graphs that share a plan, and different for others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from gpu_actors.graph.ops import Node
from gpu_actors.graph.tensor import GraphTensor
from gpu_actors.graph.validate import Order

__all__ = ["describe_graph", "signature_of"]

_VERSION = "graph-1"


def signature_of(tensors: Mapping[int, GraphTensor], order: Order) -> str:
    """SHA-256 of `describe_graph`, hexadecimal."""
    return hashlib.sha256(describe_graph(tensors, order).encode()).hexdigest()


def describe_graph(tensors: Mapping[int, GraphTensor], order: Order) -> str:
    """A graph as text: tensors by uid, then nodes in the order of their computation.

    It does not depend on the process. Names and seeds are left out, which change neither the formula nor the code.
    """
    described = (_tensor(tensors[uid]) for uid in sorted(tensors))
    return "\n".join((_VERSION, *described, *map(_node, order.nodes)))


def _tensor(tensor: GraphTensor) -> str:
    # The stride of an extent of 1 is irrelevant.
    strides = tuple(step if extent > 1 else 0 for step, extent in zip(tensor.strides, tensor.dims, strict=True))
    role = "virtual" if tensor.virtual else "value" if tensor.by_value else "array"
    value = "passed" if tensor.value is None else f"{type(tensor.value).__name__} {tensor.value!r}"
    return f"{tensor.uid} {tensor.dtype} {tensor.dims} {strides} {role} {value}"


def _node(node: Node) -> str:
    return f"{node.op} {node.inputs} {node.outputs} {node.attributes!r}"
