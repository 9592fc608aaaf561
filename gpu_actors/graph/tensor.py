"""GraphTensor: the description of a tensor of an operation graph, without its data.

Arithmetic on a tensor adds nodes to its graph: ``s * 0.125 + bias`` is a multiplication and an addition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Integral
from typing import Protocol, TypeAlias

import numpy as np

from gpu_actors.arrays.dlpack import contiguous_strides
from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.fields import DTYPES, expect, integer, real

__all__ = [
    "FLOATS",
    "INT32_MAX",
    "SCALAR_DTYPES",
    "GraphTensor",
    "Operand",
    "checked_layout",
    "checked_scalar",
    "checked_uids",
]

FLOATS = DTYPES
TENSOR_DTYPES = (*FLOATS, "int32", "bool")
SCALAR_DTYPES = ("float32", "float64", "int32", "uint64")
INT32_MAX = (1 << 31) - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FURTHEST = (1 << 63) - 1
_NEAREST = {"int64": "int32", "int16": "int32", "int8": "int32", "uint8": "bool"}


class AddsOperations(Protocol):
    """The part of a graph that its tensors use: arithmetic adds a node."""

    def operate(self, op: str, operands: Sequence[Operand]) -> GraphTensor:
        """Add a node for ``op``, and return its result."""
        ...


@dataclass(slots=True, eq=False, repr=False)
class GraphTensor:
    """A tensor of one graph. The graph's methods make it.

    uid: its key in `execute`. Negative if the graph chose it.
    dims: extents, () for a scalar that is passed by value.
    dtype: a NumPy or ml_dtypes name.
    strides: in elements.
    virtual: whether it exists only inside the graph.
    by_value: whether it is a scalar.
    value: the value of a scalar if the graph knows it, else None.
    name: a name for messages.
    """

    graph: AddsOperations
    uid: int
    dims: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    _: KW_ONLY
    virtual: bool = False
    by_value: bool = False
    value: float | None = None
    name: str = ""

    def __repr__(self) -> str:
        kind = "virtual " if self.virtual else ""
        named = f" {self.name}" if self.name else ""
        return f"<{kind}tensor {self.uid}{named} {self.dtype}{list(self.dims)}>"

    @property
    def is_float(self) -> bool:
        """Whether the dtype is a floating-point one."""
        return self.dtype in FLOATS

    def __add__(self, other: Operand) -> GraphTensor:
        return self.graph.operate("add", (self, other))

    def __radd__(self, other: Operand) -> GraphTensor:
        return self.graph.operate("add", (other, self))

    def __sub__(self, other: Operand) -> GraphTensor:
        return self.graph.operate("sub", (self, other))

    def __rsub__(self, other: Operand) -> GraphTensor:
        return self.graph.operate("sub", (other, self))

    def __mul__(self, other: Operand) -> GraphTensor:
        return self.graph.operate("mul", (self, other))

    def __rmul__(self, other: Operand) -> GraphTensor:
        return self.graph.operate("mul", (other, self))

    def __truediv__(self, other: Operand) -> GraphTensor:
        return self.graph.operate("div", (self, other))

    def __rtruediv__(self, other: Operand) -> GraphTensor:
        return self.graph.operate("div", (other, self))

    def __floordiv__(self, other: Operand) -> GraphTensor:
        return self.graph.operate("floordiv", (self, other))

    def __mod__(self, other: Operand) -> GraphTensor:
        return self.graph.operate("mod", (self, other))

    def __neg__(self) -> GraphTensor:
        return self.graph.operate("neg", (self,))

    def __abs__(self) -> GraphTensor:
        return self.graph.operate("abs", (self,))

    def __gt__(self, other: Operand) -> GraphTensor:
        return self.graph.operate("gt", (self, other))

    def __ge__(self, other: Operand) -> GraphTensor:
        return self.graph.operate("ge", (self, other))

    def __lt__(self, other: Operand) -> GraphTensor:
        return self.graph.operate("lt", (self, other))

    def __le__(self, other: Operand) -> GraphTensor:
        return self.graph.operate("le", (self, other))

    def __and__(self, other: Operand) -> GraphTensor:
        return self.graph.operate("logical_and", (self, other))

    def __or__(self, other: Operand) -> GraphTensor:
        return self.graph.operate("logical_or", (self, other))

    def __invert__(self) -> GraphTensor:
        return self.graph.operate("logical_not", (self,))

    def __bool__(self) -> bool:
        raise TypeError("a graph's tensor has no value yet: use graph.select(condition, a, b), and & | ~ for logic")


Operand: TypeAlias = "GraphTensor | float | int"


def checked_layout(
    uid: int, dims: object, strides: object, dtype: object
) -> tuple[tuple[int, ...], tuple[int, ...], str]:
    """(dims, strides, dtype) of a tensor, checked, from a user's arguments."""
    field = f"tensor {uid}"
    if not isinstance(dtype, str) or dtype not in TENSOR_DTYPES:
        nearest = _NEAREST.get(str(dtype), "float32")
        raise Unsupported(field, dtype, f"a graph's tensors are of {', '.join(TENSOR_DTYPES)}", nearest)
    extents = _integers(field, "dims", dims, 1)
    if not 1 <= len(extents) <= 4:
        raise InvalidRequest(field, extents, "must have 1 to 4 dims")
    if strides is None:
        return extents, contiguous_strides(extents, 1), dtype
    steps = _integers(field, "strides", strides, -_FURTHEST)
    if len(steps) != len(extents):
        raise InvalidRequest(field, steps, f"must have as many strides as dims, {len(extents)}")
    return extents, steps, dtype


def _integers(field: str, what: str, values: object, low: int) -> tuple[int, ...]:
    if not isinstance(values, tuple | list):
        raise InvalidRequest(f"{field} {what}", values, "must be a tuple of ints")
    return tuple(integer(f"{field} {what}", value, low) for value in values)


def checked_scalar(field: str, dtype: str, value: object) -> float | int:
    """A scalar's value, checked, in its dtype. Infinities are accepted."""
    if dtype == "uint64":
        return integer(field, value, 0, (1 << 64) - 1)
    if dtype == "int32":
        return integer(field, value, -INT32_MAX - 1, INT32_MAX)
    if isinstance(value, float | np.floating) and math.isinf(value):
        return float(value)
    number = real(field, value, "a number, or an infinity")
    holds = dtype != "float32" or abs(number) <= _FLOAT32_MAX
    expect(holds, field, value, 'must be a number that float32 holds, an infinity, or a scalar of dtype "float64"')
    return number


def checked_uids(node: str, what: str, uids: object) -> tuple[int, ...]:
    """The uids that a node names as its inputs or outputs, checked."""
    if not isinstance(uids, tuple | list) or not all(isinstance(uid, Integral) for uid in uids):
        raise InvalidRequest(node, uids, f"{what} must be a tuple of uids")
    return tuple(int(uid) for uid in uids)
