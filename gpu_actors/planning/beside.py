"""One array of the columns of two, where their library can join them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from gpu_actors.errors import InvalidRequest

__all__ = ["beside"]


def beside(field: str, left: Any, right: Any) -> Any:
    """Both along the last axis, left first. field: of the right one.

    NumPy, torch and libraries of the array API standard (CuPy, JAX) join their own arrays, in the caller's stream.
    Raises `InvalidRequest` for arrays that do not belong together, and for those of other libraries.
    """
    shape, dtype = getattr(right, "shape", ()), getattr(right, "dtype", None)
    given = f"{dtype}{list(shape)}"
    if (type(right), dtype, tuple(shape[:-1])) != (type(left), left.dtype, tuple(left.shape[:-1])):
        wanted = f"must be as the other part, {left.dtype}{list(left.shape)}, but for the last axis"
        raise InvalidRequest(field, given, wanted)
    if isinstance(left, np.ndarray):
        return np.concatenate((left, right), axis=-1)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(left, torch.Tensor):
        return torch.cat((left, right), dim=-1)
    if hasattr(left, "__array_namespace__"):
        return left.__array_namespace__().concat((left, right), axis=-1)
    raise InvalidRequest(field, given, "is of a library that joins no arrays: give paged_forward both in one")
