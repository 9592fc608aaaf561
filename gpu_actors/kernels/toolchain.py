"""The NVRTC that would compile here: its version, its headers' folders, and the library itself, loaded on
first use.

Importing CuPy and NVRTC takes about half a second, and a process whose cubins are all cached never needs
them. So the version comes from the installed packages' metadata where that is certain, and is verified once
the library is loaded.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from gpu_actors.errors import CompileError
from gpu_actors.kernels.source import exact_arch

__all__ = ["Toolchain", "find_toolchain", "load_nvrtc", "supported_archs"]

INSTALL_HINT = 'pip install "gpu-actors[cuda13]" (or "gpu-actors[cuda12]" for a CUDA 12 driver)'


class Toolchain(NamedTuple):
    """A compiler that is installed here.

    version: NVRTC's, "major.minor" or, from a wheel, with its build ("13.4.92").
    include_dirs: folders of the toolkit's headers of the same major version, in search order; may be empty.
    """

    version: str
    include_dirs: tuple[Path, ...]

    @property
    def release(self) -> tuple[int, int]:
        """(major, minor)."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)


@functools.cache
def find_toolchain() -> Toolchain | None:
    """The toolchain of this process, or None where no NVRTC can be loaded. Looked for once a process."""
    version = _packaged_version()
    if version is None:
        try:
            version = ".".join(map(str, _import_nvrtc().getVersion()))
        except Exception:  # CuPy's loader raises whatever went wrong; none of it leaves a compiler
            return None
    return Toolchain(version, _include_dirs(int(version.split(".")[0])))


@functools.cache
def load_nvrtc() -> Any:
    """CuPy's NVRTC bindings, loaded.

    Raises CompileError where they are missing (it says what to install) or are another version than the
    metadata promised, because cubins would then be cached under the wrong one.
    """
    try:
        nvrtc = _import_nvrtc()
        loaded: tuple[int, int] = tuple(nvrtc.getVersion())
    except Exception as error:
        raise CompileError(
            f"no kernel can be compiled: CuPy's NVRTC does not load ({error}); {INSTALL_HINT}"
        ) from error
    expected = find_toolchain()
    if expected is not None and expected.release != loaded:
        raise CompileError(
            f"NVRTC {loaded[0]}.{loaded[1]} was loaded but {expected.version} is installed: "
            "another toolkit comes first on the library path (LD_LIBRARY_PATH, CUDA_PATH)"
        )
    return nvrtc


@functools.cache
def supported_archs() -> tuple[str, ...]:
    """The exact architectures that this NVRTC compiles for, ascending: ("sm_75", ..., "sm_90a", ...)."""
    return tuple(exact_arch(capability) for capability in sorted(load_nvrtc().getSupportedArchs()))


def _import_nvrtc() -> Any:
    return importlib.import_module("cupy_backends.cuda.libs.nvrtc")


def _packaged_version() -> str | None:
    """NVRTC's wheel version where exactly one CuPy wheel decides which NVRTC is loaded, else None."""
    from importlib import metadata

    def version_of(distribution: str) -> str | None:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return None

    majors = [major for major in (12, 13) if version_of(f"cupy-cuda{major}x")]
    if len(majors) != 1:
        return None
    for wheel in ("nvidia-cuda-nvrtc", f"nvidia-cuda-nvrtc-cu{majors[0]}"):
        version = version_of(wheel)
        if version is not None and re.match(rf"{majors[0]}\.\d+", version):
            return version
    return None


def _include_dirs(major: int) -> tuple[Path, ...]:
    """The first toolkit of this major version: the wheels', else CUDA_PATH's or /usr/local/cuda's."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    candidates = [root / layout / "include" for root in roots for layout in (f"cu{major}", "cuda_runtime")]
    toolkits = (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    candidates += [Path(toolkit) / "include" for toolkit in toolkits if toolkit]
    for folder in candidates:
        if _runtime_major(folder) == major:
            # The C++ core libraries are folders of their own, in one layout below and in the other beside.
            libraries = (folder / "cccl", folder.parent.parent / "cuda_cccl" / "include")
            return (folder, *(library for library in libraries if library.is_dir()))
    return ()


def _runtime_major(folder: Path) -> int | None:
    try:
        text = (folder / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    return int(match[1]) // 1000 if match else None
