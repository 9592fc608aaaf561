"""Finds a C++ compiler for the emulated kernels: g++, clang++, or the one inside the ziglang wheel."""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_actors.errors import GpuActorsError, InvalidRequest
from gpu_actors.extras import install_hint
from gpu_actors.fields import one_of

__all__ = ["Toolchain", "cpu_identity"]

# Plain IEEE arithmetic, no reassociation. No headers of the C++ library: CUDA C++ has none. Shared objects of a process
# share no symbols, and _FORTIFY_SOURCE would object to leaving a fiber by longjmp.
_FLAGS = (
    "-std=c++17",
    "-nostdinc++",
    "-O2",
    "-ftree-vectorize",
    "-march=native",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fstack-clash-protection",  # a large array touches the guard page of its stack instead of skipping it
    "-U_FORTIFY_SOURCE",
    "-U_GNU_SOURCE",  # its declarations would be a third of the text of a kernel; only the executor needs them
    "-D_DEFAULT_SOURCE",
    "-DGPU_ACTORS_EMULATED=1",
    "-w",
)
# By `Toolchain.contraction`. With the macro, a kernel does not compile for a processor that cannot fuse.
_CONTRACTION_FLAGS = {
    False: ("-ffp-contract=off",),
    True: ("-ffp-contract=fast", "-DGPU_ACTORS_CONTRACTION=1"),
}
_HONOR_PRAGMAS = "-ffp-contract=fast-honor-pragmas"
_EXTRA_FLAGS = {
    "g++": ("-fno-gnu-unique", "-fno-tree-slp-vectorize"),  # vectors of straight code cost more than they save
    "clang++": (),
    # Without -nostdlib++ zig builds libc++ first. Kernels shift and alias as CUDA allows.
    "zig": ("-nostdlib++", "-fno-sanitize=undefined"),
}


@dataclass(frozen=True)
class Toolchain:
    """A compiler that can build emulated kernels.

    name: "g++", "clang++" or "zig".
    command: its command line.
    version: the first line of its version text.
    contraction: whether the compiler may fuse a product with the sum that it enters, as ptxas does. By default only an
        fmaf that a kernel writes is a fused multiply-add.
    fused_places: with contraction, a seed that chooses the blocks of code in which products may be fused, about half
        of the blocks. None: all blocks. g++ does not support a seed.
    """

    name: str
    command: tuple[str, ...]
    version: str
    contraction: bool = False
    fused_places: int | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler options, in order."""
        return (*_FLAGS, *self._contraction_flags(), *_EXTRA_FLAGS[self.name])

    @property
    def leaner_flags(self) -> tuple[str, ...]:
        """Options to add for a kernel with little arithmetic of its own, such as one that computes on tensor cores.

        The executor computes the products of tensor cores. g++ fuses products in a pass of the expensive optimisations,
        which -Og lacks.
        """
        if self.name != "g++":
            return ()
        return ("-O1", "-fexpensive-optimizations", "-fno-tree-vectorize") if self.contraction else ("-Og",)

    @property
    def checks(self) -> tuple[str, ...]:
        """Options to add for a kernel. With them plain accesses report misaligned addresses.

        The executor defines the function that such an access calls, so the compiler's own library is not needed. The
        call does not return: code that continues after it would take a third of the time to compile a kernel.
        """
        return ("-fsanitize=alignment", "-fno-sanitize-recover=alignment", "-Wl,--as-needed")

    def _contraction_flags(self) -> tuple[str, ...]:
        if self.fused_places is None or not self.contraction:
            return _CONTRACTION_FLAGS[self.contraction]
        if self.name == "g++":
            raise InvalidRequest(
                "contraction", "random", "g++ fuses all products of a unit or none: clang++ or zig can"
            )
        places = f"-DGPU_ACTORS_FUSED_PLACES={self.fused_places}"
        return (_HONOR_PRAGMAS, *_CONTRACTION_FLAGS[True][1:], places)

    @classmethod
    def fusing_at_random(cls, seed: int) -> Toolchain:
        """The first of clang++ and zig that can fuse products in blocks of code that the seed chooses.

        Raises GpuActorsError if neither can.
        """
        too_old = ""
        for name in ("clang++", "zig"):
            toolchain = _FINDERS[name]()
            if toolchain is None:
                continue
            if name == "zig" or _honors_pragmas(toolchain.command):
                return replace(toolchain, contraction=True, fused_places=seed)
            too_old = f" ({toolchain.version} does not know {_HONOR_PRAGMAS})"
        raise GpuActorsError(
            f'contraction="random" needs zig or a newer clang++ than is installed{too_old}: '
            f"run {install_hint('emulation')}"
        )

    @classmethod
    def find(cls, preferred: str | None = None) -> Toolchain:
        """The compiler named ``preferred``, or else the first of g++, clang++ and zig that is installed.

        Raises InvalidRequest for another name and GpuActorsError if no compiler is installed.
        """
        if preferred is not None:
            one_of("preferred", preferred, tuple(_FINDERS))
        names = _FINDERS if preferred is None else (preferred,)
        for name in names:
            toolchain = _FINDERS[name]()
            if toolchain is not None:
                return toolchain
        raise GpuActorsError(
            f"the emulated device compiles kernels with {' or '.join(names)}, and none is installed: "
            f"install one, or run {install_hint('emulation')}"
        )


def _find_on_path(name: str) -> Toolchain | None:
    path = shutil.which(name)
    return None if path is None else _probe(name, (path,), "--version")


def _find_zig() -> Toolchain | None:
    # zig is found by its path, and never in the working directory, where "python -m ziglang" would look first.
    working_directory = _working_directory()
    import_path = [folder for folder in sys.path if isinstance(folder, str) and folder]  # what imports look at
    folders = [folder for folder in import_path if os.path.realpath(folder) != working_directory]
    spec = importlib.machinery.PathFinder.find_spec("ziglang", folders)
    if spec is None or spec.origin is None:
        return None
    zig = _probe("zig", (str(Path(spec.origin).with_name("zig")),), "version")
    return zig and Toolchain("zig", (*zig.command, "c++"), zig.version)


def _working_directory() -> str | None:
    try:
        return os.path.realpath(os.curdir)
    except OSError:
        return None  # it has been removed


@functools.cache
def _probe(name: str, command: tuple[str, ...], option: str) -> Toolchain | None:
    """Ask the compiler for its version, once per process. None if it does not start."""
    try:
        result = subprocess.run([*command, option], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = result.stdout.strip().splitlines()
    return Toolchain(name, command, lines[0]) if lines else None


@functools.cache
def _honors_pragmas(command: tuple[str, ...]) -> bool:
    """Whether the compiler supports pragmas that say where to fuse products. Old versions of clang++ do not."""
    try:
        empty = [*command, _HONOR_PRAGMAS, "-fsyntax-only", "-x", "c++", os.devnull]
        return subprocess.run(empty, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


_FINDERS: dict[str, Callable[[], Toolchain | None]] = {
    "g++": lambda: _find_on_path("g++"),
    "clang++": lambda: _find_on_path("clang++"),
    "zig": _find_zig,
}


@functools.cache
def cpu_identity() -> str:
    """A short hash of the processor's model and features, on which -march=native depends."""
    described = [platform.machine(), platform.system()]
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        described.append(platform.processor())
    else:
        first = text.split("\n\n", 1)[0]
        names = ("model name", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
        described += [line for line in first.splitlines() if line.split(":")[0].strip() in names]
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]
