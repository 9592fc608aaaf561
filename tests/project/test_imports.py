"""The package's imports run down, as scripts/imports.py reads them: imports in functions and for types alone too."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.modules import ROOT, module_at

imports: Any = module_at(ROOT / "scripts" / "imports.py")
# What a user imports from, in the order in which a test looks for a name.
DOORS = (
    "gpu_actors",
    "gpu_actors.errors",
    "gpu_actors.testing",
    "gpu_actors.remote",
    "gpu_actors.distributed",
    "gpu_actors.serving",
    "gpu_actors.partial",
)


def test_no_import_of_the_package_runs_up_or_in_a_circle() -> None:
    assert not imports.faults()


def test_nothing_of_the_package_imports_what_no_wheel_has() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"gpu_actors"}
    for path in imports.modules().values():
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        assert not folders & {name.partition(".")[0] for name in names}, path


def inner_imports(folder: Path) -> Iterator[tuple[Path, int, str, str]]:
    """Each name that a test takes from an inner module of another room: the file, the line, the module and the name."""
    for path in sorted(folder.rglob("*.py")):
        # What is beside another library is a door of its own.
        rooms = {path.relative_to(folder).parts[0], "interop"}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not node.module or node.module in DOORS:
                continue
            package, _, rest = node.module.partition(".")
            if package == "gpu_actors" and rest.partition(".")[0] not in rooms:
                yield from ((path, node.lineno, node.module, alias.name) for alias in node.names)


def test_tests_take_public_names_from_public_doors() -> None:
    """So that what lies inside can move."""
    wrong = []
    for path, line, module, name in inner_imports(ROOT / "tests"):
        value = getattr(importlib.import_module(module), name, None)
        for door in map(importlib.import_module, DOORS):
            if name in door.__all__ and getattr(door, name) is value:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {name} is in {door.__name__}")
                break
    assert not wrong


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
