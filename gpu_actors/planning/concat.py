"""Concatenates two arrays of one library along the last axis."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gpu_actors.errors import InvalidRequest
from gpu_actors.fields import describe, expect

__all__ = ["concat"]


def concat(fields: tuple[str, str], left: Any, right: Any) -> Any:
    """Join two arrays along the last axis, left first. fields: their names.

    NumPy, torch and libraries of the array API standard (CuPy, JAX) join their own arrays, in the caller's stream.
    """
    for field, array in zip(fields, (left, right), strict=True):
        is_array = hasattr(array, "dtype") and len(getattr(array, "shape", ())) > 0
        expect(is_array, field, describe(array), "must be an array, to be joined along its last axis")
    alike = (type(right), right.dtype, tuple(right.shape[:-1])) == (type(left), left.dtype, tuple(left.shape[:-1]))
    expect(alike, fields[1], describe(right), f"must be as the other part, {describe(left)}, but for the last axis")
    if isinstance(left, np.ndarray):
        return np.concatenate((left, right), axis=-1)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(left, torch.Tensor):
        return torch.cat((left, right), dim=-1)
    if hasattr(left, "__array_namespace__"):
        return left.__array_namespace__().concat((left, right), axis=-1)
    reason = "is of a library that joins no arrays: give paged_forward both in one"
    raise InvalidRequest(fields[1], describe(right), reason)
