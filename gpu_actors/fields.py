"""Checks of single fields. Each error ends with a sentence that says what would be accepted."""

from __future__ import annotations

import contextlib
import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any

from gpu_actors.errors import InvalidRequest, Unsupported

__all__ = [
    "DTYPES",
    "FP8",
    "FURTHEST",
    "describe",
    "dtype_name",
    "dtype_of",
    "duration",
    "expect",
    "flag",
    "heads_of_layers",
    "heads_ratio",
    "integer",
    "one_of",
    "optional_array",
    "output_dtype",
    "real",
    "shape_of",
    "window",
]

# A window bound beyond every distance between two rows. It fits into the type of a row's index.
FURTHEST = (1 << 31) - 1

FP8 = ("float8_e4m3fn", "float8_e5m2")
DTYPES = ("float16", "bfloat16", "float32", "float64", *FP8)


def expect(condition: bool, field: str, value: object, reason: str) -> None:
    if not condition:
        raise InvalidRequest(field, value, reason)


def describe(array: Any) -> str:
    """Describe an array in a message by its dtype and shape, never its data. Other objects are described by their type.

    The text omits an array's library, because an adopted array is no longer the caller's own.
    """
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        return type(array).__name__
    return f"{dtype_name(array)}{list(array.shape)}"


def dtype_name(array: Any) -> str:
    dtype = getattr(array, "dtype", "no dtype")
    try:
        return _dtype_name(dtype)
    except TypeError:  # the dtype cannot be hashed
        return str(dtype)


@functools.lru_cache(maxsize=64)
def _dtype_name(dtype: object) -> str:
    # Cached because NumPy composes the name anew each time.
    return str(dtype).removeprefix("torch.")


def shape_of(field: str, array: Any, axes: str) -> tuple[int, ...]:
    """The shape of an array that must have the axes named, as in "batch, seqlen, heads, head_dim"."""
    names = axes.split(", ")
    shape = getattr(array, "shape", None)
    if shape is None or not hasattr(array, "dtype"):
        raise InvalidRequest(field, type(array).__name__, f"must be an array ({axes})")
    expect(len(shape) == len(names), field, describe(array), f"must have {len(names)} axes ({axes})")
    return tuple(int(extent) for extent in shape)


def dtype_of(field: str, array: Any) -> str:
    """The name of an operand's dtype. Raises `Unsupported` for a dtype that attention does not take."""
    name = dtype_name(array)
    if name[:1] in (">", "<"):
        reason = "must be in this machine's byte order: array.astype(array.dtype.newbyteorder('='))"
        raise InvalidRequest(field, describe(array), reason)
    if name not in DTYPES:
        nearest = {"float128": "float64", "longdouble": "float64", "float8_e4m3": "float8_e4m3fn"}
        raise Unsupported(field, name, f"must have one of the dtypes {DTYPES}", nearest.get(name, "float32"))
    return name


def output_dtype(dtype: str, asked: object = None) -> str:
    """The output's dtype for inputs of ``dtype``: ``asked`` if given, else ``dtype`` itself, or bfloat16 for fp8."""
    own = "bfloat16" if dtype in FP8 else dtype
    if asked is None:
        return own
    choices = (own,) if dtype == "float64" else (own, "float32")
    one_of("out_dtype", asked, choices, f"must be None or {' or '.join(dict.fromkeys(choices))} for {dtype} inputs")
    return str(asked)


def integer(field: str, value: object, low: int, high: int | None = None) -> int:
    if type(value) is int and low <= value and (high is None or value <= high):
        return value
    bounds = f"an int >= {low}" if high is None else f"an int in [{low}, {high}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidRequest(field, value, f"must be {bounds}")
    number = int(value)
    expect(number >= low and (high is None or number <= high), field, value, f"must be {bounds}")
    return number


def one_of(field: str, value: object, choices: tuple[str, ...], reason: str = "") -> None:
    # The type is checked first: comparing an array with a str gives an array.
    if not isinstance(value, str) or value not in choices:
        raise InvalidRequest(field, value, reason or f"must be one of {', '.join(choices)}")


def real(field: str, value: object, kind: str = "a finite number") -> float:
    number = math.nan
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        with contextlib.suppress(OverflowError):  # the int is too large for a float
            number = float(value)
    if not math.isfinite(number):
        raise InvalidRequest(field, value, f"must be {kind}")
    return number


def duration(field: str, value: object, *, above_0: bool = False) -> float:
    """Check a finite number of seconds >= 0, or > 0 with ``above_0``."""
    kind = f"a finite number of seconds {'> 0' if above_0 else '>= 0'}"
    number = real(field, value, kind)
    expect(number > 0 if above_0 else number >= 0, field, value, f"must be {kind}")
    return number


def flag(field: str, value: object) -> bool:
    expect(isinstance(value, bool), field, value, "must be True or False")
    return bool(value)


def window(value: object) -> tuple[int, int]:
    reason = "must be (left, right), two ints, each >= 0 keys or -1 for unbounded"
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InvalidRequest("window_size", value, reason)
    for bound in value:
        if isinstance(bound, bool) or not isinstance(bound, numbers.Integral) or bound < -1:
            raise InvalidRequest("window_size", value, reason)
    return min(int(value[0]), FURTHEST), min(int(value[1]), FURTHEST)


def heads_ratio(heads_q: int, heads_kv: int, field: str, keys: Any) -> None:
    """Check that heads_kv divides heads_q (GQA). field, keys: the name and the array of the KV heads, for the error."""
    ratio_holds = heads_kv >= 1 and heads_q >= heads_kv and heads_q % heads_kv == 0
    reason = f"has {heads_kv} heads, of which q's {heads_q} must be a whole multiple, at least 1"
    expect(ratio_holds, field, describe(keys), reason)


def heads_of_layers(given: object, heads_kv: Sequence[int], most: int = FURTHEST) -> list[int]:
    """The heads of q in each layer. given: ``heads_q`` of a request, one number or a list.

    heads_kv: the heads of k in each layer. most: the most heads of a layer. Raises `InvalidRequest`.
    """
    layers = len(heads_kv)
    listed = isinstance(given, list | tuple)
    heads: Any = given if listed else [given] * layers
    expect(len(heads) == layers, "heads_q", given, f"must be a number, or one for each of the {layers} layers")
    for layer, (of_q, of_k) in enumerate(zip(heads, heads_kv, strict=True)):
        field = f"heads_q[{layer}]" if listed else "heads_q"
        reason = f"must be a multiple of the {of_k} heads of k in layer {layer}"
        expect(integer(field, of_q, 1, most) % of_k == 0, field, of_q, reason)
    return [int(of_q) for of_q in heads]


def optional_array(
    field: str, array: Any, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]
) -> tuple[int, ...] | None:
    """The shape of an array that must have one of the shapes and one of the dtypes. None if it is absent."""
    if array is None:
        return None
    wanted = f"must be an array of {' or '.join(dict.fromkeys(dtypes))}, shape {' or '.join(map(str, shapes))}"
    shape = getattr(array, "shape", None)
    expect(shape is not None and hasattr(array, "dtype"), field, type(array).__name__, wanted)
    extents = tuple(int(extent) for extent in array.shape)
    expect(extents in shapes and dtype_name(array) in dtypes, field, describe(array), wanted)
    return extents
