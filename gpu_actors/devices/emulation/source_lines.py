"""Turns addresses in a built module into lines of the kernel: the calls that led to a fault."""

from __future__ import annotations

import contextlib
import itertools
import posixpath
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["describe_lines", "fault_lines", "source_lines"]

_LINE = re.compile(r"^([^\n]+):([1-9]\d*)(?: \(discriminator \d+\))?$", re.MULTILINE)
_DIRECTORY = re.compile(r"^  (\d+)\t\(.*\): (.*)$", re.MULTILINE)
_FIRST_FILE = re.compile(r"^  1\t(\d+)\t\(.*\): (.*)$", re.MULTILINE)
_UNIT = "captured.cpp"  # the compiler's input, all of whose lines come from other files
_OWN = "emulation/"  # headers of the device itself
_TIMEOUT = 30.0  # seconds


def source_lines(library: Path, behind: Sequence[int], names: Mapping[str, str]) -> tuple[str, ...]:
    """ "file:line" of each call, the kernel's own first, the innermost last: an instruction's wrapper, for example.

    behind: offsets in the library, each just after its call, the innermost call first.
    names: the compiler's names of files to the names to show.
    Inlined calls count, calls inside the emulated device do not, and a recursion counts once.

    addr2line of GNU binutils, which comes with g++, reads the module's line table. Returns () if it is not installed.
    """
    if not behind:
        return ()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return tuple(line for line, _ in itertools.groupby(_lines(library, behind, names)))[::-1]
    return ()


def fault_lines(
    library: Path, frames: Sequence[int], issued: int, names: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields lines and issued of an `EmulationFault`, from the fields of emulation::Fault."""
    about = source_lines(library, [issued] if issued else [], names)
    return source_lines(library, frames, names) or about, about


def describe_lines(lines: Sequence[str], issued: Sequence[str]) -> str:
    """ " at FILE:LINE > FILE:LINE", and the lines of the issued operation if they differ."""
    text = f" at {' > '.join(lines)}" if lines else ""
    return text + (f", about what was issued at {' > '.join(issued)}" if issued and issued != lines else "")


def _lines(library: Path, behind: Sequence[int], names: Mapping[str, str]) -> Iterator[str]:
    printed = _run("addr2line", "-i", "-e", str(library), *(hex(offset - 1) for offset in behind))
    for file, line in _LINE.findall(printed):
        name = posixpath.normpath(file)
        if name == _UNIT:
            name = _first_file(library)
        if not name.startswith((_OWN, "/", "?")):
            yield f"{names.get(name, name)}:{line}"


def _first_file(library: Path) -> str:
    """File 1 of the line table. Some versions of addr2line confuse it with file 0, the unit (DWARF 5, 6.2.4.1)."""
    table = _run("readelf", "--debug-dump=rawline", str(library))
    match = _FIRST_FILE.search(table)
    directory = dict(_DIRECTORY.findall(table)).get(match[1]) if match else None
    return posixpath.normpath(posixpath.join(directory or ".", match[2])) if match else "?"


def _run(*command: str) -> str:
    process = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT, check=True)
    return process.stdout
