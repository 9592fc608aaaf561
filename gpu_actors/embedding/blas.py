"""The number of threads that NumPy's BLAS uses, changed while the program runs."""

from __future__ import annotations

from gpu_actors.errors import GpuActorsError, InvalidRequest
from gpu_actors.extras import missing

__all__ = ["limit_blas_threads"]


def limit_blas_threads(count: int) -> bool:
    """Have every BLAS of this process use ``count`` threads, as OPENBLAS_NUM_THREADS would before NumPy's import.

    For programs, not for libraries: it changes the whole process. Returns False, and changes nothing, if no BLAS with
    such a setting is found. Raises `InvalidRequest` unless count >= 1, `GpuActorsError` where threadpoolctl (extra
    "demo") is missing.
    """
    if count < 1:
        raise InvalidRequest("count", count, "must be an int >= 1")
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError as error:
        raise GpuActorsError(f"BLAS threads cannot be limited: {missing(error, 'demo')}") from error
    import numpy as np  # noqa: F401 - loads its BLAS

    libraries = ThreadpoolController().select(user_api="blas")
    libraries.limit(limits=count)
    return len(libraries) > 0
