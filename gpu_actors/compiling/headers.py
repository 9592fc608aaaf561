"""The headers that a source reaches, so that NVRTC gets all of them in memory and the cache key covers each.

Conditional includes are followed on every branch: a key that covers an unused header costs at most one compile, while a
key that misses a header is stale. NVRTC handles a header that is not found: it refuses the source if the branch is
taken.
"""

from __future__ import annotations

import functools
import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from gpu_actors.errors import CompileError

__all__ = ["Header", "follow_includes", "include_closure", "includes_of", "leaves_closure", "toolkit_closure"]

# A directive may follow a comment, spell # as %:, and have comments between its words.
_GAP = r"(?:[ \t]|/\*.*?\*/)*"
_INCLUDE = re.compile(rf"^(?:.*\*/)?{_GAP}(?:#|%:){_GAP}include(?:_next)?\b{_GAP}(.*)$", re.M)
_HAS_INCLUDE = re.compile(rf"__has_include(?:_next)?{_GAP}\({_GAP}(.*)$", re.M)
_SPELLED = re.compile(r'"([^"\n]+)"|<([^>\n]+)>')


class Includes(NamedTuple):
    """The include directives of one text: the names, and the lines that name a macro instead."""

    names: tuple[str, ...]
    computed: tuple[str, ...]


class Header(NamedTuple):
    """A header's text and its path below the folder that it was found in."""

    text: str
    place: str


Lookup = Callable[[str, str], Header | None]  # (name as spelled, place of the text that includes it)


def leaves_closure(name: str) -> bool:
    """Whether a header's name leads out of the folder of headers: it is absolute or contains ".."."""
    return name.startswith("/") or ".." in name.split("/")


@functools.lru_cache(maxsize=4096)
def includes_of(text: str) -> Includes:
    """The headers that ``text`` includes or tests with ``__has_include``, each once, in order."""
    joined = re.sub(r"\\[ \t]*\r?\n", "", text)
    names: dict[str, None] = {}
    computed: list[str] = []
    for match in (*_INCLUDE.finditer(joined), *_HAS_INCLUDE.finditer(joined)):
        if spelled := _SPELLED.match(match[1]):
            names.setdefault(spelled[1] or spelled[2])
        else:
            computed.append(match[0].strip())
    return Includes(tuple(names), tuple(computed))


def include_closure(source: str, find: Callable[[str], str | None]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The headers that ``source`` reaches, by name, and the names that it reaches but ``find`` lacks.

    find: returns the text for a name, or None.

    Raises CompileError for an include that would leave the closure: of a path that a compiler always reads from the
    disk (see `leaves_closure`), or of a macro.
    """

    def lookup(name: str, _place: str) -> Header | None:
        text = None if leaves_closure(name) else find(name)
        return None if text is None else Header(text, name)

    used, missing = follow_includes(source, lookup)
    for text in (source, *used.values()):
        _refuse_escapes(text)
    return used, missing


@functools.lru_cache(maxsize=256)
def toolkit_closure(names: tuple[str, ...], include_dirs: tuple[Path, ...]) -> Mapping[str, str]:
    """The toolkit's headers that ``names`` reach, by the name that their includes spell. Unknown names are left out.

    A process reads each file once.
    """

    def lookup(name: str, place: str) -> Header | None:
        beside = posixpath.normpath(posixpath.join(posixpath.dirname(place), name))
        for candidate in dict.fromkeys((name, beside)):
            for folder in include_dirs:
                text = _read_header(folder / candidate)
                if text is not None:
                    return Header(text, candidate)
        return None

    start = "".join(f"#include <{name}>\n" for name in names)
    return follow_includes(start, lookup)[0]


@functools.cache
def _read_header(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None


def follow_includes(source: str, lookup: Lookup) -> tuple[dict[str, str], tuple[str, ...]]:
    """The headers that a text reaches: texts by spelled name, and the names that ``lookup`` lacks."""
    waiting = [("", source)]
    used: dict[str, str] = {}
    missing: dict[str, None] = {}
    while waiting:
        place, text = waiting.pop()
        for name in includes_of(text).names:
            if name in used:
                continue
            header = lookup(name, place)
            if header is None:
                missing.setdefault(name)
            else:
                used[name] = header.text
                missing.pop(name, None)
                waiting.append((header.place, header.text))
    return used, tuple(missing)


def _refuse_escapes(text: str) -> None:
    includes = includes_of(text)
    for line in includes.computed:
        raise CompileError(
            f"{line!r}: an include must spell its header's name, so that the cache key covers the text",
            source_line=line,
        )
    for name in includes.names:
        if leaves_closure(name):
            raise CompileError(
                f"#include of the path {name!r}: give the text in headers= by a relative name without '..'",
                source_line=f'#include "{name}"',
            )
