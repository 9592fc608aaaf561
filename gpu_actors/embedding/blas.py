"""The number of threads that NumPy's OpenBLAS uses, changed while the program runs."""

from __future__ import annotations

import ctypes
from pathlib import Path

__all__ = ["limit_blas_threads"]

SETTERS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads")


def limit_blas_threads(count: int) -> bool:
    """Have every OpenBLAS of this process use ``count`` threads, as OPENBLAS_NUM_THREADS would before NumPy's import.

    For programs, not for libraries: it concerns the whole process. False where no OpenBLAS was found (another BLAS,
    or a system without /proc), and then nothing was changed.
    """
    found = False
    for path in _loaded_libraries("openblas"):
        library = ctypes.CDLL(path)
        for name in SETTERS:
            setter = getattr(library, name, None)
            if setter is not None:
                setter(ctypes.c_int(count))
                found = True
                break
    return found


def _loaded_libraries(part: str) -> set[str]:
    import numpy as np  # noqa: F401 - loads its BLAS

    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    paths = (line.split(maxsplit=5)[5] for line in maps.splitlines() if line.count("/") and ".so" in line)
    return {path for path in paths if part in Path(path).name}
