"""The package's imports run down, as scripts/imports.py reads them: imports in functions and for types alone too."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from support.modules import ROOT, module_at

imports: Any = module_at(ROOT / "scripts" / "imports.py")


def test_no_import_of_the_package_runs_up_or_in_a_circle() -> None:
    assert not imports.faults()


def test_nothing_of_the_package_imports_what_no_wheel_has() -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"gpu_actors"}
    for path in imports.modules().values():
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        assert not folders & {name.partition(".")[0] for name in names}, path


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
