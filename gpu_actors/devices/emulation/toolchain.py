"""Finds a C++ compiler for the emulated kernels: g++, clang++, or the one inside the ziglang wheel."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpu_actors.errors import GpuActorsError, InvalidRequest

__all__ = ["Toolchain", "cpu_identity"]

# Plain IEEE arithmetic: a fused multiply-add only where a kernel writes fmaf, no reassociation. Shared objects of one
# process share no symbols (hidden, no unique ones), and _FORTIFY_SOURCE would object to leaving a fiber by longjmp.
_FLAGS = (
    "-std=c++17",
    "-O2",
    "-ftree-vectorize",
    "-march=native",
    "-ffp-contract=off",
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
    "-D_GNU_SOURCE",
    "-DGPU_ACTORS_EMULATED=1",
    "-w",
)
_EXTRA_FLAGS = {
    "g++": ("-fno-gnu-unique",),
    "clang++": (),
    # Without -nostdlib++ zig first builds the whole of libc++, which takes a minute; nothing here needs it. Its
    # undefined-behaviour traps are off because kernels shift and alias as CUDA allows.
    "zig": ("-nostdlib++", "-fno-sanitize=undefined"),
}


@dataclass(frozen=True)
class Toolchain:
    """A compiler that can build emulated kernels.

    name: "g++", "clang++" or "zig". command: what starts it. version: the first line of its version text.
    """

    name: str
    command: tuple[str, ...]
    version: str

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler options, in order."""
        return (*_FLAGS, *_EXTRA_FLAGS[self.name])

    @classmethod
    def find(cls, preferred: str | None = None) -> Toolchain:
        """The compiler called preferred, or else the first of g++, clang++ and zig that is installed.

        Raises InvalidRequest for another name and GpuActorsError where no compiler is found.
        """
        if preferred is not None and preferred not in _FINDERS:
            raise InvalidRequest("preferred", preferred, "a compiler is one of " + ", ".join(_FINDERS))
        names = _FINDERS if preferred is None else (preferred,)
        for name in names:
            found = _FINDERS[name]()
            if found is not None:
                return found
        raise GpuActorsError(
            f"the emulated device compiles kernels with {' or '.join(names)}, and none is installed: "
            'install one, or run pip install "gpu-actors[emulation]"'
        )


def _find_on_path(name: str) -> Toolchain | None:
    path = shutil.which(name)
    return None if path is None else _probe(name, (path,), "--version")


def _find_zig() -> Toolchain | None:
    if importlib.util.find_spec("ziglang") is None:
        return None
    found = _probe("zig", (sys.executable, "-m", "ziglang"), "version")
    return found and Toolchain("zig", (*found.command, "c++"), found.version)


@functools.cache
def _probe(name: str, command: tuple[str, ...], option: str) -> Toolchain | None:
    """Asks the compiler for its version, once a process. None where it does not start."""
    try:
        result = subprocess.run([*command, option], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return Toolchain(name, command, result.stdout.strip().splitlines()[0])


_FINDERS: dict[str, Callable[[], Toolchain | None]] = {
    "g++": lambda: _find_on_path("g++"),
    "clang++": lambda: _find_on_path("clang++"),
    "zig": _find_zig,
}


@functools.cache
def cpu_identity() -> str:
    """A short hash of the processor's model and features: what -march=native depends on."""
    described = [platform.machine(), platform.system()]
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        described.append(platform.processor())
    else:
        first = text.split("\n\n", 1)[0]
        wanted = ("model name", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
        described += [line for line in first.splitlines() if line.split(":")[0].strip() in wanted]
    return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]
