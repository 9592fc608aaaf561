"""The driver's library, for calls that CuPy does not offer, or makes without letting other threads run meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Any

__all__ = ["library", "make_primary_context"]


@functools.cache
def library() -> Any:
    """The library. ctypes lets other threads run during its calls. Raises OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def make_primary_context(index: int) -> None:
    """Have the primary context of device ``index`` made, once a process, while other threads run.

    It takes a tenth of a second up to several, for which CuPy's setDevice would hold the interpreter's lock. Where the
    driver refuses, nothing is done: setDevice says why. The context is never released, as CUDA's runtime does not
    release it either.
    """
    with contextlib.suppress(OSError):
        driver, device, context = library(), ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
