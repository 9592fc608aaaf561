"""Finds the CUDA sources that ship with the package, in a wheel and in a checkout."""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Mapping
from pathlib import Path

from gpu_actors.compiling.headers import Header, follow_includes
from gpu_actors.errors import GpuActorsError, InvalidRequest

__all__ = ["asset_headers", "asset_root", "asset_text", "asset_texts", "completed_headers"]


@functools.cache
def asset_root() -> Path:
    """A checkout's folder ``kernels_cu``, or the archive of a wheel. Raises GpuActorsError if there is neither."""
    package = Path(__file__).resolve().parent.parent
    places = (package / "kernels_cu.zip", package.parent / "kernels_cu")
    for place in places:
        if place.exists():
            return place
    missing = " and no ".join(map(str, places))
    raise GpuActorsError(f"the package's CUDA sources are missing: there is no {missing}; reinstall gpu-actors")


@functools.cache
def asset_texts() -> dict[str, str]:
    """All sources and headers, by name relative to ``kernels_cu``. A process reads them once."""
    root = asset_root()
    if root.is_file():
        with zipfile.ZipFile(root) as archive:
            return {name: archive.read(name).decode() for name in archive.namelist()}
    paths = sorted(root.rglob("*.cu*"))
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def asset_text(name: str) -> str:
    """The text of ``kernels_cu/<name>``. Raises InvalidRequest if there is none."""
    text = asset_texts().get(name)
    if text is None:
        names = ", ".join(name for name in asset_texts() if name.endswith(".cu"))
        raise InvalidRequest("name", name, f"no such file in kernels_cu, which has {names or 'no .cu file'}")
    return text


@functools.cache
def kernel_file(kernel: str) -> str:
    """The file of a kernel of the package, relative to ``kernels_cu``. Raises InvalidRequest if there is none."""
    for name in asset_texts():
        if name.endswith(f"/{kernel}.cu"):
            return name
    raise InvalidRequest("kernel", kernel, f"kernels_cu has no file {kernel}.cu")


def asset_headers(source: str) -> dict[str, str]:
    """The headers of ``kernels_cu`` that ``source`` reaches, by the name that its includes spell.

    Includes in the headers of subfolders also spell names relative to ``kernels_cu``: NVRTC finds headers by spelling.
    """

    def lookup(name: str, _place: str) -> Header | None:
        text = asset_texts().get(name)
        return None if text is None else Header(text, name)

    return follow_includes(source, lookup)[0]


def completed_headers(source: str, headers: Mapping[str, str]) -> dict[str, str]:
    """``headers``, and the headers of ``kernels_cu`` that ``source`` and ``headers`` reach."""
    return asset_headers("\n".join((source, *headers.values()))) | dict(headers)
