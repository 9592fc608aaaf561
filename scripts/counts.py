"""How far options and lines spread: python scripts/counts.py prints the counts of docs/reports/house.md.

An option is spelled in a file of the package or of the kernels that has its name as a word, in lower or upper case.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = ("sink_tokens", "softcap", "alibi_slopes")
ROOMS = ("actors", "kernels", "runtime", "planning", "compiling")


def sources() -> Iterator[Path]:
    """Every Python file of the package and every CUDA file of the kernels."""
    yield from (ROOT / "gpu_actors").rglob("*.py")
    yield from (path for path in (ROOT / "kernels_cu").rglob("*") if path.suffix in (".cu", ".cuh"))


def spelled_in(option: str) -> list[str]:
    """The files that spell an option."""
    word = re.compile(rf"\b{option}\b", re.IGNORECASE)
    found = (path for path in sources() if word.search(path.read_text(encoding="utf-8")))
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def lines_of(room: str) -> int:
    """The lines of a room's Python files."""
    paths = (ROOT / "gpu_actors" / room).rglob("*.py")
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def main() -> None:
    for option in OPTIONS:
        print(f"{option:13} is spelled in {len(spelled_in(option))} files")
    counts = {room: lines_of(room) for room in ROOMS}
    print(f"{sum(counts.values())} lines: {', '.join(f'{room} {count}' for room, count in counts.items())}")


if __name__ == "__main__":
    main()
