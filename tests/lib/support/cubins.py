"""What the cache's tests share: small sources, a compiler that only counts, and child processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from inside.compiling import Toolchain, cubin_cache

from gpu_actors import Cubin, KernelResources, KernelSource

REPOSITORY = Path(cubin_cache.__file__).parents[2]
ARCH = "sm_90a"
KERNEL = 'extern "C" __global__ void fill(int* p) { p[threadIdx.x] = VALUE; }\n'


def kernel(value: int = 1, **changes: object) -> KernelSource:
    """A kernel that stores ``value``; equal values are equal variants."""
    fields = {"name": "fill.cu", "source": KERNEL, "entry_points": ("fill",), "macros": {"VALUE": value}}
    return KernelSource(**{**fields, **changes})  # type: ignore[arg-type]


def fake_toolchain(*, load: bool = False) -> Toolchain:
    return Toolchain("13.4.92", ())


class CountingCompiler:
    """Stands for NVRTC where a test is about the cache: answers with bytes that depend on the source's macros.

    wait: what a compile waits for.
    """

    def __init__(self, size: int = 1000, wait: Callable[[], object] = lambda: None) -> None:
        self.calls: list[KernelSource] = []
        self._size = size
        self._wait = wait
        self._lock = threading.Lock()

    def __call__(self, source: KernelSource, arch: str) -> Cubin:
        with self._lock:
            self.calls.append(source)
        self._wait()
        data = repr((dict(source.macros), arch)).encode().ljust(self._size, b"\x5a")
        return Cubin(data, arch, source.entry_points, "log", {"fill": KernelResources(8, 0, 0, 0)})


def start_child(code: str, *arguments: object, flags: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A Python process that runs ``code`` with ``sys.argv[1:] == arguments``."""
    folders = [str(REPOSITORY), str(Path(__file__).parents[1])]
    return subprocess.Popen(
        [sys.executable, *flags, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
    )


def run_child(code: str, *arguments: object, flags: tuple[str, ...] = ()) -> str:
    """The standard output of a child that must end well."""
    child = start_child(code, *arguments, flags=flags)
    output, errors = child.communicate(timeout=200)
    assert child.returncode == 0, errors
    return output.strip()


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.cubin"))
