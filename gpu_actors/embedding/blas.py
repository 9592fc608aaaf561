"""Reads and changes the number of threads of NumPy's BLAS while the program runs."""

from __future__ import annotations

from typing import Any

from gpu_actors.errors import GpuActorsError
from gpu_actors.extras import missing
from gpu_actors.fields import integer

__all__ = ["blas_threads", "limit_blas_threads"]


def blas_threads() -> int:
    """The number of threads of NumPy's BLAS: every core, or OPENBLAS_NUM_THREADS. 1 if no BLAS is found.

    Raises `GpuActorsError` if threadpoolctl (extra "demo") is missing.
    """
    return max((library["num_threads"] for library in _libraries().info()), default=1)


def limit_blas_threads(count: int) -> bool:
    """Make every BLAS of this process use ``count`` threads, as OPENBLAS_NUM_THREADS does before NumPy's import.

    For programs, not for libraries: it changes the whole process. Returns False, and changes nothing, if no BLAS with
    such a setting is found. Raises `InvalidRequest` unless count >= 1, `GpuActorsError` if threadpoolctl (extra "demo")
    is missing.
    """
    integer("count", count, 1)
    libraries = _libraries()
    libraries.limit(limits=count)
    return len(libraries) > 0


def _libraries() -> Any:
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError as error:
        raise GpuActorsError(f"BLAS threads cannot be limited: {missing(error, 'demo')}") from error
    import numpy as np  # noqa: F401 - loads its BLAS

    return ThreadpoolController().select(user_api="blas")
