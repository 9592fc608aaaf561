"""The arguments of a user's own kernel: which of them are arrays, and the bytes of the others."""

from __future__ import annotations

import ctypes
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gpu_actors.arrays.adopt import dtype_of
from gpu_actors.compiling.signature import KernelParameter
from gpu_actors.errors import InvalidRequest

__all__ = ["argument_field", "arguments_by_place", "value_bytes", "written_places"]

_POINTER_BYTES = 8


def argument_field(parameters: Sequence[KernelParameter], place: int) -> str:
    """The name of an argument in errors: ``args['x']``, or ``args[0]`` if the parameter has no name."""
    return f"args[{parameters[place].name or place!r}]"


def arguments_by_place(parameters: Sequence[KernelParameter], args: Any) -> tuple[Any, ...]:
    """Return one argument per parameter, from a sequence in the parameters' order or a mapping by their names."""
    names = [parameter.name for parameter in parameters]
    if isinstance(args, Mapping):
        if "" in names:
            raise InvalidRequest(
                "args", "a mapping", "must be a sequence: not every parameter of the kernel has a name"
            )
        for name in args:
            if name not in names:
                raise InvalidRequest("args", name, f"the kernel's parameters are {', '.join(names) or 'none'}")
        for name in names:
            if name not in args:
                raise InvalidRequest(f"args[{name!r}]", None, "is missing")
        return tuple(args[name] for name in names)
    if not isinstance(args, tuple | list):
        reason = "must be a tuple, a list, or a mapping by the parameters' names"
        raise InvalidRequest("args", type(args).__name__, reason)
    if len(args) != len(parameters):
        spelled = ", ".join(parameter.spelled for parameter in parameters) or "none"
        raise InvalidRequest("args", f"{len(args)} arguments", f"the kernel takes {len(parameters)}: {spelled}")
    return tuple(args)


def written_places(parameters: Sequence[KernelParameter], out: Any) -> tuple[int, ...]:
    """The places of the parameters whose arrays receive the kernel's results.

    out: a name or place, or a sequence of them; None stands for every pointer to a type that is not const.
    """
    if out is None:
        return tuple(place for place, parameter in enumerate(parameters) if parameter.written)
    wanted = out if isinstance(out, tuple | list) else (out,)
    names = {parameter.name: place for place, parameter in enumerate(parameters) if parameter.name}
    places: dict[int, None] = {}
    for one in wanted:
        place = names.get(one) if isinstance(one, str) else one
        if type(place) is not int or not 0 <= place < len(parameters) or not parameters[place].written:
            choices = ", ".join(p.name or str(i) for i, p in enumerate(parameters) if p.written) or "none"
            raise InvalidRequest("out", one, f"must name parameters that the kernel writes through: {choices}")
        places.setdefault(place)
    return tuple(places)


def value_bytes(parameter: KernelParameter, size: int | None, value: Any, field: str) -> bytes:
    """The bytes of an argument that is no array. size: the parameter's bytes, None if unknown."""
    if parameter.pointer:
        data = bytes(_POINTER_BYTES)  # None: a null pointer
    elif parameter.dtype is not None:
        data = _scalar_bytes(parameter, value, field)
    else:
        data = _whole_bytes(parameter, value, field)
        if size is None:
            reason = f"the compiled kernel does not say how large {parameter.type} is: pass it by a pointer"
            raise InvalidRequest(field, value, reason)
    if size is not None and len(data) != size:
        raise InvalidRequest(field, f"{len(data)} bytes", f"the kernel takes {size} bytes for {parameter.spelled}")
    return data


def _scalar_bytes(parameter: KernelParameter, value: Any, field: str) -> bytes:
    assert parameter.dtype is not None
    dtype = dtype_of(parameter.dtype)
    if dtype.kind == "b":
        if not isinstance(value, bool | np.bool_):
            raise InvalidRequest(field, value, "must be a bool")
        return np.array(bool(value), dtype).tobytes()
    if isinstance(value, bool | np.bool_ | np.ndarray):
        raise InvalidRequest(field, value, f"must be a number, for {parameter.spelled}")
    if dtype.kind in "iu":
        try:
            index = operator.index(value)
        except TypeError:
            raise InvalidRequest(field, value, f"must be an integer, for {parameter.spelled}") from None
        limits = np.iinfo(dtype)
        if not limits.min <= index <= limits.max:
            raise InvalidRequest(field, value, f"{parameter.type} holds {limits.min} to {limits.max}")
        return np.array(index, dtype).tobytes()
    if not (isinstance(value, numbers.Real | np.floating) or type(value).__module__ == "ml_dtypes"):
        raise InvalidRequest(field, value, f"must be a real number, for {parameter.spelled}")
    beyond = InvalidRequest(field, value, f"is beyond the range of {parameter.type}")
    try:
        number = float(value)
    except OverflowError:  # an int that no float holds
        raise beyond from None
    with np.errstate(over="ignore"):
        rounded = np.array(number).astype(dtype)
    # This checks the value itself, because a finite long double may be an infinite float.
    if value == value and abs(value) != math.inf and not math.isfinite(float(rounded)):
        raise beyond
    return rounded.tobytes()


def _whole_bytes(parameter: KernelParameter, value: Any, field: str) -> bytes:
    """The bytes of a struct, or of another type that the source names."""
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.names:
        return value.tobytes()
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, bytes | bytearray | memoryview | ctypes.Structure | ctypes.Union):
        return bytes(value)
    reason = (
        f"must be the bytes of {parameter.type}: a structured NumPy scalar, a NumPy number such as np.int32(1), "
        "a ctypes.Structure, or bytes"
    )
    raise InvalidRequest(field, value, reason)
