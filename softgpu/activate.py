"""Puts the driver into this process: its library, CuPy's runtime module, and notes of what is compiled."""

from __future__ import annotations

import ctypes
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from softgpu.images import Images

if TYPE_CHECKING:
    from gpu_actors.compiling.compiler import Compiler
    from gpu_actors.compiling.cubin_cache import Compile, CubinCache
    from gpu_actors.compiling.source import Cubin, KernelSource
    from gpu_actors.compiling.variant import Variant
    from gpu_actors.devices.cuda.api import MemoryBlock
    from gpu_actors.devices.cuda.cupy_api import CupyApi

__all__ = ["FOLDER_VARIABLE", "activate", "driver"]

FOLDER_VARIABLE = "SOFTGPU_FOLDER"
"""Names the folder of the built parts, for this process and those that it starts."""

_RUNTIME = "cupy_backends.cuda.api.runtime"
_FINDER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)

images = Images()


@functools.cache
def driver() -> Any:
    """The driver's library, loaded into this process by the first call."""
    return ctypes.CDLL(str(Path(os.environ[FOLDER_VARIABLE]) / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)


def activate() -> None:
    """Make ``libcuda.so.1`` the software driver. Must be called before CuPy is imported. Idempotent."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if _RUNTIME in sys.modules:
        raise RuntimeError("CuPy is imported already, with NVIDIA's runtime")
    # CuPy's own kernels must be compiled here, so that their sources are noted.
    os.environ.setdefault("CUPY_CACHE_IN_MEMORY", "1")
    os.environ["SOFTGPU_LINES"] = shlex.join([sys.executable, "-I", str(Path(__file__).with_name("lines.py"))])
    driver().softgpu_set_finder(_finder)
    sys.meta_path.insert(0, _Finder())


def _find(image: int, nbytes: int) -> int:
    _kept.value = ctypes.create_string_buffer(images.find(image, nbytes))
    return ctypes.addressof(_kept.value)


_kept = threading.local()
_finder = _FINDER(_find)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds CuPy's runtime module in the overlay, and changes some modules once they are imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == _RUNTIME:
            overlay = str(Path(os.environ[FOLDER_VARIABLE]) / "overlay")
            return importlib.machinery.PathFinder.find_spec(name, [overlay])
        change = _CHANGES.get(name)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changed(spec.loader, change)
        return spec


class _Changed(importlib.abc.Loader):
    def __init__(self, loader: Any, change: Callable[[], None]) -> None:
        self._loader = loader
        self._change = change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change()


# A change imports its module, which is executed by then. So mypy checks its calls against the module.


def _note_compiled() -> None:
    from gpu_actors.compiling.compiler import Compiler

    original = Compiler.compile

    @functools.wraps(original)
    def compile(self: Compiler, source: KernelSource, arch: str | None = None) -> Cubin:
        cubin = original(self, source, arch)
        images.note(source, cubin)
        return cubin

    Compiler.compile = compile  # type: ignore[method-assign]


def _note_cached() -> None:
    from gpu_actors.compiling.cubin_cache import CubinCache

    original = CubinCache.get_or_compile

    @functools.wraps(original)
    def get_or_compile(self: CubinCache, variant: Variant, compile: Compile) -> Cubin:
        cubin = original(self, variant, compile)
        images.note(variant.source, cubin)
        return cubin

    CubinCache.get_or_compile = get_or_compile  # type: ignore[method-assign]


_POOL_UNIT = 512
"""CuPy's pool gives memory out in multiples of so many bytes."""


def _watch_pool() -> None:
    """Tell the driver what the device's pool gives out and takes back, because only the pool knows."""
    from gpu_actors.devices.cuda.cupy_api import CupyApi

    allocate, free = CupyApi.allocate, CupyApi.free

    @functools.wraps(allocate)
    def watched_allocate(self: CupyApi, nbytes: int) -> MemoryBlock:
        block = allocate(self, nbytes)
        driver().softgpu_lease(ctypes.c_uint64(block.address), ctypes.c_uint64(nbytes), ctypes.c_uint64(_POOL_UNIT))
        return block

    @functools.wraps(free)
    def watched_free(self: CupyApi, block: MemoryBlock) -> None:
        driver().softgpu_release(ctypes.c_uint64(block.address))
        free(self, block)

    CupyApi.allocate, CupyApi.free = watched_allocate, watched_free  # type: ignore[method-assign]


def _note_cupys() -> None:
    """Note what CuPy compiles.

    NVRTC's own cache is off, because with it NVRTC asks a driver for a table that is not documented.
    """
    from cupy.cuda.compiler import _NVRTCProgram

    original = _NVRTCProgram.compile

    @functools.wraps(original)
    def compile(self: Any, options: tuple[str, ...] = (), log_stream: Any = None) -> Any:
        result, mapping = original(self, (*options, "--no-cache"), log_stream)
        if self.method == "cubin":
            images.note_cupys(self.src, result)
        return result, mapping

    _NVRTCProgram.compile = compile


_CHANGES: dict[str, Callable[[], None]] = {
    "cupy.cuda.compiler": _note_cupys,
    "gpu_actors.compiling.compiler": _note_compiled,
    "gpu_actors.compiling.cubin_cache": _note_cached,
    "gpu_actors.devices.cuda.cupy_api": _watch_pool,
}
