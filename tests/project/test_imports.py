"""The package's imports point downwards, also those in functions and for types, as scripts/imports.py reads them."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import importlib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.modules import ROOT, module_at

imports: Any = module_at(ROOT / "scripts" / "imports.py")
# The modules that users import from, in the order in which a test looks for a name.
DOORS = (
    "gpu_actors",
    "gpu_actors.errors",
    "gpu_actors.testing",
    "gpu_actors.remote",
    "gpu_actors.distributed",
    "gpu_actors.serving",
    "gpu_actors.status",
    "gpu_actors.partial",
    "gpu_actors.metrics",
    "gpu_actors.otel_metrics",
)
INSIDE = ROOT / "tests" / "lib" / "inside"


# An import has its own line (E701 and E702 of ruff). Parsing every file would take twenty times as long.
IMPORT = re.compile(r"^[ \t]*((?:import|from)[ \t](?:[^\n(\\]|\\\n|\([^)]*\))*)", re.M)


@functools.cache
def statements(path: Path) -> tuple[tuple[int, ast.Import | ast.ImportFrom], ...]:
    """The imports of a file with their lines, also those in strings for other processes."""
    text = path.read_text(encoding="utf-8")
    taken: list[tuple[int, ast.Import | ast.ImportFrom]] = []
    for match in IMPORT.finditer(text):
        with contextlib.suppress(SyntaxError):  # a sentence that looks like an import
            (node, *_) = ast.parse(match[1]).body
            if isinstance(node, ast.Import | ast.ImportFrom):
                taken.append((text.count("\n", 0, match.start()) + 1, node))
    return tuple(taken)


@functools.cache
def found() -> list[Any]:
    gc.disable()  # otherwise it walks through the growing trees
    try:
        return list(imports.imports(imports.modules()))
    finally:
        gc.enable()


def test_no_import_of_the_package_runs_up_or_in_a_circle() -> None:
    assert (imports.upward(found()), imports.circles(found())) == ([], [])


def test_every_arrow_between_rooms_that_is_drawn_is_an_import() -> None:
    rooms = {(each.importer.partition(".")[0], each.imported.partition(".")[0]) for each in found()}
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    arrows: list[tuple[str, ...]] = []
    for chain in re.findall(r"^    (\w.* --> .*\w)$", page, re.M):
        # "graph" is a keyword of the drawing's language, so that room is written "graph_".
        stages = [re.findall(r"\w*[^\W_]", stage) for stage in chain.split(" --> ")]
        arrows += [pair for both in itertools.pairwise(stages) for pair in itertools.product(*both)]
    assert ("handles", "actors") in arrows
    assert ("kv", "kernels") in arrows
    assert [arrow for arrow in arrows if arrow not in rooms] == []


def test_nothing_of_the_package_imports_what_no_wheel_has() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"gpu_actors"}
    for path in imports.modules().values():
        nodes = [node for _, node in statements(path)]
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        assert not folders & {name.partition(".")[0] for name in names}, path


@functools.cache
def inner_imports(path: Path) -> tuple[tuple[int, str, str], ...]:
    """The names that a test file takes from inner modules of other rooms: line, module, name."""
    folder = path.relative_to(ROOT / "tests").parts[0]
    # Modules for other libraries are doors themselves.
    rooms = {folder, "interop", *(["devices"] if folder in ("emulation", "gpu") else [])}
    inner = []
    for line, node in statements(path):
        if isinstance(node, ast.Import):
            taken = [(alias.name, "") for alias in node.names if alias.name.count(".") > 1]
        elif node.module and node.module not in DOORS:
            taken = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in taken:
            package, _, rest = module.partition(".")
            room = rest.partition(".")[0]
            if package == "gpu_actors" and room not in rooms and not (room == rest and name in _door(room)):
                inner.append((line, module, name))
    return tuple(inner)


def _door(room: str) -> Sequence[str]:
    """The public names of a room; none for a module outside of rooms."""
    if not (ROOT / "gpu_actors" / room / "__init__.py").is_file():
        return ()
    names: Sequence[str] = getattr(importlib.import_module(f"gpu_actors.{room}"), "__all__", ())
    return names


def test_tests_of_other_rooms_see_the_inside_of_a_room_in_one_place() -> None:
    """So inner code can move with changes to its own room's tests and one line of tests/lib/inside."""
    files = [path for path in sorted((ROOT / "tests").rglob("*.py")) if not path.is_relative_to(INSIDE)]
    wrong = []
    for path in filter(inner_imports, files):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lines = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)}
        wrong += [(path.relative_to(ROOT), *inner) for inner in inner_imports(path) if inner[0] in lines]
    assert not wrong, "import these by tests/lib/inside"


def test_tests_take_public_names_from_public_doors() -> None:
    wrong = []
    for path in sorted(INSIDE.glob("*.py")):
        for line, module, name in inner_imports(path):
            value = getattr(importlib.import_module(module), name, None)
            for door in map(importlib.import_module, DOORS):
                if name in door.__all__ and getattr(door, name) is value:
                    wrong.append(f"{path.relative_to(ROOT)}:{line}: {name} is in {door.__name__}")
                    break
    assert not wrong


def test_every_name_of_an_inside_is_used() -> None:
    taken: dict[str, set[str]] = {path.stem: set() for path in INSIDE.glob("*.py")}
    for path in (ROOT / "tests").rglob("*.py"):
        for _, node in statements(path):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("inside."):
                taken[node.module.removeprefix("inside.")] |= {alias.name for alias in node.names}
    given = {path.stem: {name for _, _, name in inner_imports(path)} for path in INSIDE.glob("*.py")}
    assert given == taken


@pytest.mark.parametrize(
    ("texts", "fault"),
    [
        ({"errors.py": "x = 1\nimport gpu_actors.options\n"}, "gpu_actors/errors.py:2: errors imports options"),
        (
            {"values.py": "def late():\n    from gpu_actors.runtime import call\n"},
            "gpu_actors/values.py:2: values imports runtime.call",
        ),
        (
            {"arrays/adopt.py": "from gpu_actors.compiling.source import Trace\n"},
            "gpu_actors/arrays/adopt.py:1: arrays.adopt imports compiling.source",
        ),
        (
            {
                "runtime/call.py": "import typing\nif typing.TYPE_CHECKING:\n    import gpu_actors.runtime.mailbox\n",
                "runtime/mailbox.py": "from gpu_actors.runtime.call import Call\n",
            },
            "circle: runtime.call, runtime.mailbox",
        ),
    ],
    ids=["to a higher floor", "in a function", "across a floor", "for types alone, in a circle"],
)
def test_the_line_that_breaks_the_order_is_named(tmp_path: Path, texts: dict[str, str], fault: str) -> None:
    package = tmp_path / "gpu_actors"
    for name in ("errors", "options", "values", "runtime/call", "runtime/mailbox", "arrays/adopt", "compiling/source"):
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts.get(f"{name}.py", ""))
    assert imports.faults(package) == [fault]
