"""The driver's library, for calls that CuPy lacks or makes while it holds the GIL."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Any

__all__ = ["library", "make_primary_context"]


@functools.cache
def library() -> Any:
    """The driver's library. ctypes releases the GIL during its calls. Raises OSError if there is no such library."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def make_primary_context(index: int) -> None:
    """Make the primary context of device ``index``, once per process, without the GIL.

    This takes between a tenth of a second and several seconds. CuPy's setDevice would hold the GIL meanwhile. If the
    driver refuses, nothing happens here, and setDevice raises the reason. The context is never released. CUDA's runtime
    does not release it either.
    """
    with contextlib.suppress(OSError):
        driver, device, context = library(), ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
