"""Checks which way the package's imports run: python scripts/imports.py prints each one that runs up, and each circle.

FLOORS lists the package from the ground up. A module may import modules of lower floors and of its own package, without
circles. Imports in functions and imports for types alone count too, because a reader of a file has to follow them.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent / "gpu_actors"

FLOORS: tuple[tuple[str, ...], ...] = (
    ("_version", "catching", "clock", "values"),
    ("extras",),
    ("errors",),
    ("process",),
    ("fields",),
    ("attention", "model_files"),
    ("devices.fault_plan",),
    ("tracing",),
    ("validation", "arrays", "compiling"),
    ("options", "partial"),
    ("devices",),
    ("kernels",),
    ("graph", "runtime", "kv"),
    ("reference",),
    ("planning",),
    ("qualification",),
    ("actors",),
    ("handles",),
    ("isolation",),
    ("context",),
    ("distributed",),
    ("interop", "embedding", "testing"),
    ("generation",),
    ("server",),
    ("asgi", "key_mask", "metrics", "openai_api", "otel_metrics", "remote", "serving", "status"),
    ("bench",),
    ("cli",),
    ("",),
)


class Import(NamedTuple):
    """One import of one module of the package by another. line: its line in the importer."""

    importer: str
    line: int
    imported: str


def modules(root: Path = ROOT) -> dict[str, Path]:
    """A package's modules by their name in it: "runtime.call", and "" for the package itself."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(known: dict[str, Path]) -> Iterator[Import]:
    """Every import of a module of the package by another."""
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == ROOT.name:
                package = node.module.removeprefix(ROOT.name).lstrip(".")
                for alias in node.names:
                    inner = f"{package}.{alias.name}".lstrip(".")
                    targets.append(inner if inner in known else package)
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
                targets = [name.removeprefix(ROOT.name).lstrip(".") for name in names if _is_own(name)]
            for target in targets:
                if target in known and target != name:
                    yield Import(name, node.lineno, target)


def floor(name: str) -> int:
    """The floor of a module: that of the longest entry that is the module or a package around it."""
    for length in range(name.count(".") + 1, -1, -1):
        entry = ".".join(name.split(".")[:length])
        for number, entries in enumerate(FLOORS):
            if entry in entries and (entry or not name):
                return number
    raise KeyError(f"{name} stands on no floor; name it in FLOORS")


def upward(found: list[Import]) -> list[Import]:
    """The imports that run up, or across a floor into another package."""
    return [
        each
        for each in found
        if floor(each.imported) >= floor(each.importer) and _room(each.importer) != _room(each.imported)
    ]


def faults(root: Path = ROOT) -> list[str]:
    """A line for each import that runs up, with its place, and one for each circle."""
    known = modules(root)
    found = list(imports(known))
    places = {each: f"{known[each.importer].relative_to(root.parent)}:{each.line}" for each in found}
    up = [f"{places[each]}: {each.importer} imports {each.imported or ROOT.name}" for each in upward(found)]
    return up + [f"circle: {', '.join(ring)}" for ring in circles(found)]


def circles(found: list[Import]) -> list[list[str]]:
    """The sets of modules that import each other in a circle."""
    ahead: dict[str, set[str]] = {}
    for each in found:
        ahead.setdefault(each.importer, set()).add(each.imported)
    reach = {name: _reached(name, ahead) for name in ahead}
    rings = {frozenset(other for other in reach[name] if name in reach.get(other, ())) for name in ahead}
    return sorted(sorted(ring) for ring in rings if ring)


def _reached(name: str, ahead: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(ahead[name])
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            waiting += ahead.get(each, ())
    return found


def _room(name: str) -> str:
    return name.partition(".")[0]


def _is_own(name: str) -> bool:
    return name.split(".")[0] == ROOT.name


def main() -> int:
    """Print the faults. Returns 1 if an import runs up or in a circle."""
    found = faults()
    print(*found, sep="\n", end="\n" if found else "")
    rings = sum(fault.startswith("circle") for fault in found)
    print(f"{len(modules())} modules, {len(found) - rings} imports that run up, {rings} circles, {len(FLOORS)} floors")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
