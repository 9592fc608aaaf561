"""Checks the arrays and numbers of one `execute` against the graph's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpu_actors.arrays.adopt import Adopted, AnyArray, CallerNotes, element_strides
from gpu_actors.arrays.dlpack import contiguous_strides
from gpu_actors.arrays.request_arrays import take_in
from gpu_actors.errors import InvalidRequest
from gpu_actors.fields import describe
from gpu_actors.graph.lists import check_lists
from gpu_actors.graph.tensor import GraphTensor, checked_scalar

if TYPE_CHECKING:
    from gpu_actors.graph.graph import OperationGraph

__all__ = ["Binding", "bind_arrays", "memory_order"]


@dataclass(frozen=True, slots=True)
class Binding:
    """The arguments of one `execute`, by uid.

    arrays: the array of every input.
    numbers: the number of every scalar that is passed to `execute`.
    foreign: the arrays that are not NumPy's.
    """

    arrays: dict[int, AnyArray]
    numbers: dict[int, float | int]
    foreign: dict[int, Adopted]


def bind_arrays(graph: OperationGraph, arguments: object, device: str, notes: CallerNotes | None = None) -> Binding:
    """Check and adopt the arrays and numbers of one `execute`. device, notes: as in `adopt_request`."""
    order = graph.order()
    if not isinstance(arguments, Mapping):
        raise InvalidRequest("arrays", type(arguments).__name__, "must be a mapping of uid to array")
    uids = {*order.inputs, *order.scalars}
    for uid in arguments:
        if uid not in uids:
            raise InvalidRequest("arrays", uid, f"is no input of the graph; it takes {sorted(uids)}")
    for uid in sorted(uids):
        if arguments.get(uid) is None:
            raise InvalidRequest(f"tensor {uid}", None, "must be given")
    numbers = {uid: _number(graph.tensors[uid], arguments[uid]) for uid in order.scalars}
    arrays: dict[int, AnyArray] = {}
    foreign: dict[int, Adopted] = {}
    for uid in order.inputs:
        adopted = _array(graph.tensors[uid], arguments[uid], device, notes)
        if adopted.kind != "numpy":
            foreign[uid] = adopted
        arrays[uid] = adopted.array
    if any(node.op == "block_mask" for node in order.nodes):
        check_lists(order.nodes, arrays)
    return Binding(arrays, numbers, foreign)


def _number(tensor: GraphTensor, value: Any) -> float | int:
    return checked_scalar(f"tensor {tensor.uid}", tensor.dtype, value)


def _array(tensor: GraphTensor, value: Any, device: str, notes: CallerNotes | None) -> Adopted:
    field = f"tensor {tensor.uid}"
    adopted = take_in(value, field, device, notes)
    array = adopted.array
    if tuple(array.shape) != tensor.dims or array.dtype.name != tensor.dtype:
        expected = f"must be {tensor.dtype} of shape {tensor.dims}, as the graph describes it"
        raise InvalidRequest(field, describe(value), expected)
    for extent, stride, step in zip(tensor.dims, array.strides, tensor.strides, strict=True):
        if extent > 1 and stride != step * array.itemsize:
            reason = f"the graph describes strides {tensor.strides}, in elements: describe the array's own, or copy it"
            raise InvalidRequest(field, f"strides {element_strides(array)}", reason)
    return adopted


def memory_order(tensor: GraphTensor) -> tuple[int, ...]:
    """A tensor's axes from the slowest to the fastest. Raises InvalidRequest for an output that would have gaps."""
    axes = sorted(range(len(tensor.dims)), key=lambda axis: (tensor.dims[axis] > 1, -tensor.strides[axis], axis))
    packed = contiguous_strides([tensor.dims[axis] for axis in axes], 1)
    for axis, step in zip(axes, packed, strict=True):
        if tensor.dims[axis] > 1 and tensor.strides[axis] != step:
            reason = "an output is written without gaps: give the strides of its dims in some order"
            raise InvalidRequest(f"tensor {tensor.uid}", tensor.strides, reason)
    return tuple(axes)
