"""Shared by tests of the cubin cache: small sources, a compiler that only counts, and child processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from inside.compiling import Toolchain, Variant, cubin_cache

from gpu_actors import Cubin, KernelResources, KernelSource

REPOSITORY = Path(cubin_cache.__file__).parents[2]
ARCH = "sm_90a"
KERNEL = 'extern "C" __global__ void fill(int* p) { p[threadIdx.x] = VALUE; }\n'


def kernel(value: int = 1, **changes: object) -> KernelSource:
    """A kernel that stores ``value``; equal values are equal variants."""
    fields = {"name": "fill.cu", "source": KERNEL, "entry_points": ("fill",), "macros": {"VALUE": value}}
    return KernelSource(**{**fields, **changes})  # type: ignore[arg-type]


def variant(value: int = 1, arch: str | None = ARCH, **changes: object) -> Variant:
    """`kernel` for an architecture."""
    return Variant.of(kernel(value, **changes), arch)


def fake_toolchain(*, load: bool = False) -> Toolchain:
    return Toolchain("13.4.92", ())


class CountingCompiler:
    """Replaces NVRTC in tests of the cache: returns bytes that depend on the source's macros and the architecture.

    wait: called by each compile.
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


class Fork:
    """A process that runs `work` with one end of a pipe, whose other end is `end`. It begins as a copy of this one."""

    def __init__(self, work: Callable[[Connection], object]) -> None:
        self.end, theirs = multiprocessing.Pipe()
        with warnings.catch_warnings():  # of forking with threads, which the child does not need
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            try:
                work(theirs)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        theirs.close()

    def __enter__(self) -> Connection:
        return self.end

    def __exit__(self, *_: object) -> None:
        """Kill the process and wait for its end."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def run_child(code: str, *arguments: object, flags: tuple[str, ...] = ()) -> str:
    """The output of a new Python process that runs ``code`` with ``sys.argv[1:] == arguments``. It must exit with 0."""
    folders = [str(REPOSITORY), str(Path(__file__).parents[1])]
    command = [sys.executable, *flags, "-c", code, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.cubin"))
