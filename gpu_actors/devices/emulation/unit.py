"""Compile a unit, which is a kernel's or the executor's: find its headers and run the compiler."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import posixpath
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gpu_actors.compiling.assets import asset_texts
from gpu_actors.compiling.headers import include_closure
from gpu_actors.devices.emulation.toolchain import Toolchain
from gpu_actors.process import SERVICE_SIGNALS

__all__ = ["CompilerFailed", "definitions", "headers_of", "run_compiler", "write_headers"]

# Variables that name folders of headers. No key covers those headers, so the compiler does not get the variables.
_HEADER_FOLDERS = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")

_OWN_SIGNALS = """
import os, signal, sys
for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""

_QUIET_SECONDS = 1.0  # how long a compile runs before it is logged
_log = logging.getLogger(__name__)


class CompilerFailed(Exception):
    """The compiler refused its input. log: what it printed."""

    def __init__(self, log: str) -> None:
        super().__init__(log)
        self.log = log


def headers_of(text: str, headers: Path | Mapping[str, str]) -> dict[str, str]:
    """Every header that ``text`` includes, directly or not: name to text, sorted. The compiler reports missing headers.

    headers: a folder, or name to text. A header that is not there is taken from kernels_cu.
    """
    reachable, _ = include_closure(text, functools.partial(_find_header, headers))
    return dict(sorted(reachable.items()))


def _find_header(headers: Path | Mapping[str, str], name: str) -> str | None:
    if posixpath.normpath(name) != name:
        return None  # like NVRTC, which finds headers by their spelling
    if isinstance(headers, Mapping) and name in headers:
        return headers[name]
    if isinstance(headers, Path):
        with contextlib.suppress(OSError):
            return (headers / name).read_text(encoding="utf-8")
    return asset_texts().get(name)


def write_headers(headers: Mapping[str, str], folder: Path) -> None:
    for name, text in headers.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def definitions(macros: Mapping[str, str]) -> list[str]:
    return [f"-D{name}={value}" for name, value in macros.items()]


def run_compiler(toolchain: Toolchain, arguments: Sequence[str], work: Path, compiler_cache: Path, what: str) -> None:
    """Run the compiler in the folder ``work``, with the toolchain's flags and ``arguments``. Raises `CompilerFailed`.

    arguments: the last one is the file that the compiler writes. compiler_cache: a folder for the compiler's own cache.
    what: the name of the input in the log. A run of more than a second is logged.
    """
    command = [*_signal_reset_command(), *toolchain.command, *toolchain.flags, *arguments]
    inherited = {name: value for name, value in os.environ.items() if name not in _HEADER_FOLDERS}
    # zig builds its own parts once, into the cache. The other files of this run are removed with ``work``.
    zig_folders = {"ZIG_GLOBAL_CACHE_DIR": str(compiler_cache / "zig"), "ZIG_LOCAL_CACHE_DIR": str(work / "zig")}
    with _service_signals_blocked():
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=work,
            env={**inherited, **zig_folders},
        )
    with process:
        try:
            log = _output(process, what)
        except BaseException:
            process.kill()
            raise
    if process.returncode < 0:
        number = -process.returncode
        log += f"{toolchain.command[0]} was ended by signal {number} ({signal.strsignal(number)})"
    # A program that ignores SIGCHLD does not get the exit status. But a compiler that fails writes no file.
    if process.returncode != 0 or not (work / arguments[-1]).exists():
        raise CompilerFailed(log)


def _signal_reset_command() -> list[str]:
    """A prefix of the compiler's command that resets signals. Empty unless the program ignores SIGCHLD.

    The compiler would ignore SIGCHLD too, but it waits for child processes of its own.
    """
    ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    return [sys.executable, "-I", "-S", "-c", _OWN_SIGNALS] if ignored and sys.executable else []


@contextlib.contextmanager
def _service_signals_blocked() -> Iterator[None]:
    """Let processes start with the signals blocked by which a terminal, a supervisor or a batch system stops a service.

    Such signals are sent to every process of the service, but an accepted request may still wait for the compiler.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SERVICE_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _output(process: subprocess.Popen[str], what: str) -> str:
    try:
        return process.communicate(timeout=_QUIET_SECONDS)[0]
    except subprocess.TimeoutExpired:
        _log.info("emulation: %s is being compiled for the CPU, once for this cache folder", what)
        return process.communicate()[0]
