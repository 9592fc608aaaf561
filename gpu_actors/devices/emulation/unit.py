"""What kernels and the executor have in common when they are compiled: their headers and the compiler's run."""

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

# Folders of headers that no key covers.
_HEADER_FOLDERS = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")

_OWN_SIGNALS = """
import os, signal, sys
for number in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""

_QUIET_SECONDS = 1.0  # of a compile before the log tells of it
_log = logging.getLogger(__name__)


class CompilerFailed(Exception):
    """The compiler refused its input. log: what it printed."""

    def __init__(self, log: str) -> None:
        super().__init__(log)
        self.log = log


def headers_of(text: str, given: Path | Mapping[str, str]) -> dict[str, str]:
    """Every header that ``text`` reaches, name to text, sorted. What is not found is left to the compiler to name.

    given: a folder, or name to text; kernels_cu completes it.
    """
    found, _ = include_closure(text, functools.partial(_find_header, given))
    return dict(sorted(found.items()))


def _find_header(headers: Path | Mapping[str, str], name: str) -> str | None:
    if posixpath.normpath(name) != name:
        return None  # as NVRTC, which knows headers by one spelling
    if isinstance(headers, Mapping) and name in headers:
        return headers[name]
    if isinstance(headers, Path):
        with contextlib.suppress(OSError):
            return (headers / name).read_text(encoding="utf-8")
    return asset_texts().get(name)


def write_headers(headers: Mapping[str, str], folder: Path) -> None:
    """Write each header below ``folder``, where the compiler finds it by its name."""
    for name, text in headers.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def definitions(macros: Mapping[str, str]) -> list[str]:
    """The compiler's options that define these macros."""
    return [f"-D{name}={value}" for name, value in macros.items()]


def run_compiler(toolchain: Toolchain, arguments: Sequence[str], work: Path, kept: Path, what: str) -> None:
    """Run the compiler with its usual options and these, in the folder ``work``. Raises CompilerFailed.

    arguments: the last one is the file that it writes. kept: a folder for what the compiler itself keeps for later
    runs. what: what is compiled, for the log, where a run that takes over a second is told.
    """
    command = [*_launcher(), *toolchain.command, *toolchain.flags, *arguments]
    inherited = {name: value for name, value in os.environ.items() if name not in _HEADER_FOLDERS}
    # zig keeps its own parts, built once, in the cache; what belongs to this run goes with the folder.
    own = {"ZIG_GLOBAL_CACHE_DIR": str(kept / "zig"), "ZIG_LOCAL_CACHE_DIR": str(work / "zig")}
    with _kept_from_supervisors():
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=work,
            env={**inherited, **own},
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
    # A program that ignores SIGCHLD does not learn the status. A compiler that fails leaves no file.
    if process.returncode != 0 or not (work / arguments[-1]).exists():
        raise CompilerFailed(log)


def _launcher() -> list[str]:
    """What goes before the command where the program ignores SIGCHLD: the compiler, which has processes of its own to
    wait for, would inherit that."""
    ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    return [sys.executable, "-I", "-S", "-c", _OWN_SIGNALS] if ignored and sys.executable else []


@contextlib.contextmanager
def _kept_from_supervisors() -> Iterator[None]:
    """What is started here blocks the signals that a terminal, a supervisor or a batch system may send to every process
    of a service: a request that the program has accepted may wait for it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SERVICE_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _output(process: subprocess.Popen[str], what: str) -> str:
    try:
        return process.communicate(timeout=_QUIET_SECONDS)[0]
    except subprocess.TimeoutExpired:
        _log.info("emulation: %s is being compiled for the CPU, once for this cache folder", what)
        return process.communicate()[0]
