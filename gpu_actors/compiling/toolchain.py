"""The NVRTC of this process: its version, the folders of its headers, and the library, which is loaded on first use.

Importing CuPy and NVRTC takes about half a second, and a process whose cubins are all cached never needs them. So the
version comes from the metadata of the installed packages until the library is loaded. Then it is the library's own,
because a toolkit on the library path may come before the installed one.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gpu_actors.compiling.source import exact_arch
from gpu_actors.errors import CompileError
from gpu_actors.extras import cuda_hint, version_of
from gpu_actors.process import process_folder

__all__ = [
    "FindToolchain",
    "Toolchain",
    "find_toolchain",
    "import_cupy",
    "installed_toolchain",
    "load_nvrtc",
    "mismatch",
    "supported_archs",
]

logger: logging.Logger = logging.getLogger("gpu_actors")


class Toolchain(NamedTuple):
    """An installed compiler.

    version: NVRTC's, "major.minor" or, from a wheel, with its build ("13.4.92").
    include_dirs: folders of the toolkit's headers of the same major version, in search order. May be empty.
    """

    version: str
    include_dirs: tuple[Path, ...]

    @property
    def release(self) -> tuple[int, int]:
        """(major, minor)."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


class FindToolchain(Protocol):
    """Finds the compiler. load: load it first, so that its version is exact; this may raise CompileError."""

    def __call__(self, *, load: bool = False) -> Toolchain | None: ...


def find_toolchain(*, load: bool = False) -> Toolchain | None:
    """The toolchain of this process, or None if no NVRTC can be loaded.

    load: load NVRTC first. Before NVRTC is loaded, the result is `installed_toolchain`; afterwards the loaded one.
    Raises CompileError only with ``load``, as `load_nvrtc` does.
    """
    if load:
        load_nvrtc()
    return installed_toolchain() if _loaded is None else _loaded


_loaded: Toolchain | None = None
"""The loaded toolchain, if it is not the installed one."""


# Finding and loading a compiler imports many modules that programs without compiles do not need, so opening a device
# does not import them. A fork waits for such an import, because no thread of the child would finish it.
_importing = threading.RLock()
os.register_at_fork(before=_importing.acquire, after_in_parent=_importing.release, after_in_child=_importing.release)


@functools.cache
def installed_toolchain() -> Toolchain | None:
    """The toolchain of the installed packages, or None if no NVRTC can be loaded."""
    with _importing:
        version = _packaged_version()
        if version is not None:
            return _toolchain(version)
        try:
            return _toolchain(".".join(map(str, _import_nvrtc().getVersion())))
        except Exception:  # CuPy's loader may raise anything if there is no compiler
            return None


@functools.cache
def load_nvrtc() -> Any:
    """Load CuPy's NVRTC bindings. From then on `find_toolchain` returns the loaded release.

    Raises CompileError, which says what to install, if they are missing.
    """
    try:
        with _importing:
            nvrtc = _import_nvrtc()
            loaded: tuple[int, int] = tuple(nvrtc.getVersion())  # this call loads the library
    except Exception as error:
        raise CompileError(f"no kernel can be compiled: CuPy's NVRTC does not load ({error}); {cuda_hint()}") from error
    _note_loaded(loaded)
    return nvrtc


def _note_loaded(loaded: tuple[int, int]) -> None:
    global _loaded
    installed = installed_toolchain()
    if installed is not None and installed.release == loaded:
        return
    _loaded = _toolchain(".".join(map(str, loaded)))
    if (why := mismatch()) is not None:
        logger.warning("kernels are compiled by NVRTC %s: %s", _loaded.version, why)


def mismatch() -> str | None:
    """Why the loaded toolchain is not the installed one. None if it is the same, or not loaded."""
    installed = installed_toolchain()
    if _loaded is None or installed is None:
        return None
    return (
        f"CuPy loads it, and not {installed.version}, which is installed, because another toolkit comes first on the "
        "library path (LD_LIBRARY_PATH, CUDA_PATH)"
    )


def _toolchain(version: str) -> Toolchain:
    return Toolchain(version, _include_dirs(Toolchain(version, ()).release))


@functools.cache
def supported_archs() -> tuple[str, ...]:
    """The exact architectures that this NVRTC compiles for, ascending: ("sm_75", ..., "sm_90a", ...)."""
    return tuple(exact_arch(capability) for capability in sorted(load_nvrtc().getSupportedArchs()))


def import_cupy(module: str = "cupy") -> Any:
    """Import a module of CuPy and return it.

    CuPy creates the folder of its kernel cache at its import, and the import fails if it cannot. So without a writable
    home folder that cache is a temporary folder. CUPY_CACHE_DIR has precedence.
    """
    with _importing:
        if "cupy" not in sys.modules and not _cupy_cache_can_be_made():
            os.environ["CUPY_CACHE_DIR"] = str(process_folder("cupy"))
            try:
                importlib.import_module("cupy")
            finally:
                del os.environ["CUPY_CACHE_DIR"]  # CuPy has read it, and child processes must not inherit it
        return importlib.import_module(module)


def _cupy_cache_can_be_made() -> bool:
    if "CUPY_CACHE_DIR" in os.environ:
        return True  # if this is wrong, CuPy's error names the user's folder
    home = Path(os.path.expanduser("~"))
    if not home.is_absolute():
        return False
    folder = home / ".cupy" / "kernel_cache"
    above = next(place for place in (folder, *folder.parents) if place.exists())
    return above.is_dir() and (above == folder or os.access(above, os.W_OK | os.X_OK))


def _import_nvrtc() -> Any:
    return import_cupy("cupy_backends.cuda.libs.nvrtc")


def _packaged_version() -> str | None:
    """The version of NVRTC's wheel if exactly one CuPy wheel decides which NVRTC is loaded, else None."""
    majors = [major for major in (12, 13) if version_of(f"cupy-cuda{major}x")]
    if len(majors) != 1:
        return None
    for wheel in ("nvidia-cuda-nvrtc", f"nvidia-cuda-nvrtc-cu{majors[0]}"):
        version = version_of(wheel)
        if version is not None and re.match(rf"{majors[0]}\.\d+", version):
            return version
    return None


def _include_dirs(release: tuple[int, int]) -> tuple[Path, ...]:
    """The include folders of the toolkit of this release, or else of this major version.

    The wheels are searched first, then CUDA_PATH and /usr/local/cuda.
    """
    major = release[0]
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    candidates = [root / layout / "include" for root in roots for layout in (f"cu{major}", "cuda_runtime")]
    toolkits = (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    candidates += [Path(toolkit) / "include" for toolkit in toolkits if toolkit]
    releases = {folder: _runtime_release(folder) for folder in candidates}
    matching = [folder for folder, version in releases.items() if version is not None and version[0] == major]
    if not matching:
        return ()
    folder = next((folder for folder in matching if releases[folder] == release), matching[0])
    # The C++ core libraries have folders of their own: below this one in one layout, beside it in the other.
    libraries = (folder / "cccl", folder.parent.parent / "cuda_cccl" / "include")
    return (folder, *(library for library in libraries if library.is_dir()))


def _runtime_release(folder: Path) -> tuple[int, int] | None:
    try:
        text = (folder / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return (int(match[1]) // 1000, int(match[1]) % 1000 // 10) if match else None
