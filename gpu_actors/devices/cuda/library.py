"""The driver's library, for calls that CuPy lacks or makes with the GIL held."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Any

__all__ = ["library", "make_primary_context"]


@functools.cache
def library() -> Any:
    """The library. ctypes releases the GIL during its calls. Raises OSError if there is none."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def make_primary_context(index: int) -> None:
    """Make the primary context of device ``index``, once a process, without the GIL.

    It takes a tenth of a second up to several, during which CuPy's setDevice would hold the GIL. If the driver refuses,
    nothing happens: setDevice raises the reason. The context is never released, as CUDA's runtime does not release it
    either.
    """
    with contextlib.suppress(OSError):
        driver, device, context = library(), ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
