"""The numbers that are passed to a graph by value."""

from __future__ import annotations

import math

import numpy as np

from gpu_actors.fields import expect, integer, real

__all__ = ["INT32_MAX", "SCALAR_DTYPES", "checked_scalar"]

SCALAR_DTYPES = ("float32", "float64", "int32", "uint64")
INT32_MAX = (1 << 31) - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def checked_scalar(field: str, dtype: str, value: object) -> float | int:
    """A scalar's value in its dtype. Infinities are accepted. Raises InvalidRequest for ``field``."""
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
