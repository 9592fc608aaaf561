"""From addresses in a built module to lines of the kernel: where the calls that led to a fault stand."""

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
_UNIT = "captured.cpp"  # what the compiler is given. No line of it is of its own.
_OWN = "emulation/"  # headers of the device itself
_SECONDS = 30.0


def source_lines(library: Path, behind: Sequence[int], names: Mapping[str, str]) -> tuple[str, ...]:
    """ "file:line" of each call, the kernel's own first, the innermost last: an instruction's wrapper, for example.

    behind: offsets in the library, each just behind its call, the innermost call first. names: what to call files that
    the compiler knows by another name. Inlined calls count, calls inside the emulated device do not, and a recursion
    counts once.

    addr2line of GNU binutils, which g++ comes with, reads the module's line table. Empty where it is not installed.
    """
    if not behind:
        return ()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return tuple(line for line, _ in itertools.groupby(_lines(library, behind, names)))[::-1]
    return ()


def fault_lines(
    library: Path, frames: Sequence[int], issued: int, names: Mapping[str, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What `EmulationFault` calls lines and issued, from the fields of emulation::Fault."""
    about = source_lines(library, [issued] if issued else [], names)
    return source_lines(library, frames, names) or about, about


def describe_lines(lines: Sequence[str], issued: Sequence[str]) -> str:
    """ " at FILE:LINE > FILE:LINE", and what was issued elsewhere."""
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
    """File 1 of the line table. Versions of addr2line take it for file 0, the unit itself (DWARF 5, 6.2.4.1)."""
    table = _run("readelf", "--debug-dump=rawline", str(library))
    found = _FIRST_FILE.search(table)
    directory = dict(_DIRECTORY.findall(table)).get(found[1]) if found else None
    return posixpath.normpath(posixpath.join(directory or ".", found[2])) if found else "?"


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=True)
    return done.stdout
