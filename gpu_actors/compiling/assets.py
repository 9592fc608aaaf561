"""Finds the CUDA sources that ship with the package, in a wheel and in a checkout alike."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpu_actors.compiling.headers import Header, follow_includes, leaves_closure
from gpu_actors.compiling.source import KernelSource, MacroValue
from gpu_actors.errors import GpuActorsError, InvalidRequest

__all__ = ["asset_headers", "asset_root", "asset_source", "asset_text", "completed_headers"]


@functools.cache
def asset_root() -> Path:
    """The folder ``kernels_cu``. Raises GpuActorsError where the installation lacks it."""
    package = Path(__file__).resolve().parent.parent
    candidates = (package / "kernels_cu", package.parent / "kernels_cu")  # a wheel, a checkout
    for folder in candidates:
        if folder.is_dir():
            return folder
    places = " or ".join(map(str, candidates))
    raise GpuActorsError(f"the package's CUDA sources are missing: no folder {places}; reinstall gpu-actors")


@functools.cache
def asset_text(name: str) -> str:
    """The text of ``kernels_cu/<name>``, read once a process. Raises InvalidRequest where there is none."""
    root = asset_root()
    path = (root / name).resolve()
    if not path.is_relative_to(root) or not path.is_file():
        have = ", ".join(sorted(str(p.relative_to(root)) for p in root.rglob("*.cu")))
        raise InvalidRequest("name", name, f"no such file in kernels_cu, which has {have or 'no .cu file'}")
    return path.read_text(encoding="utf-8")


@functools.cache
def kernel_file(kernel: str) -> str:
    """The file of a kernel of the package, relative to ``kernels_cu``. Raises InvalidRequest where there is none."""
    root = asset_root()
    for path in root.glob(f"*/{kernel}.cu"):
        return path.relative_to(root).as_posix()
    raise InvalidRequest("kernel", kernel, f"kernels_cu has no file {kernel}.cu")


def asset_headers(source: str) -> dict[str, str]:
    """The headers of ``kernels_cu`` that ``source`` reaches, by the name that its includes spell.

    Names are relative to ``kernels_cu``, also inside headers in its folders: NVRTC knows headers by their
    spelling.
    """

    def lookup(name: str, _place: str) -> Header | None:
        with contextlib.suppress(OSError):  # as where a name is longer than any file's
            if not leaves_closure(name) and (asset_root() / name).is_file():
                return Header(asset_text(name), name)
        return None

    return follow_includes(source, lookup)[0]


def asset_source(
    name: str,
    entry_points: Sequence[str],
    *,
    macros: Mapping[str, MacroValue] | None = None,
    headers: Mapping[str, str] | None = None,
    arch: str | None = None,
) -> KernelSource:
    """The kernel file ``name`` of the package with the headers that it reaches, ready to compile.

    headers: text that takes the place of the package's own, by name; it may include more of them.
    Raises InvalidRequest naming the field at fault.
    """
    text = asset_text(name)
    headers = completed_headers(text, headers or {})
    return KernelSource(name, text, tuple(entry_points), headers, macros or {}, arch=arch)


def completed_headers(source: str, headers: Mapping[str, str]) -> dict[str, str]:
    """``headers`` with those of ``kernels_cu`` that ``source`` and they reach and do not bring themselves."""
    return asset_headers("\n".join((source, *headers.values()))) | dict(headers)
