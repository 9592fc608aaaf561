"""Every notebook of the documentation runs from top to bottom and prints what it shows."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import json
from pathlib import Path
from typing import Any

import pytest
from support.service import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "docs").rglob("*.ipynb"))


def cells(notebook: Path) -> list[tuple[str, str]]:
    """The source of each cell of code, and its saved output."""
    found = [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    return [
        ("".join(cell["source"]), "".join(text for output in cell["outputs"] for text in output["text"]))
        for cell in found
    ]


async def printed(source: str, names: dict[str, Any]) -> str:
    """The output of a cell. ``await`` is allowed outside of functions."""
    code = compile(source, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        if code.co_flags & inspect.CO_COROUTINE:
            await eval(code, names)
        else:
            exec(code, names)
    return output.getvalue()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_a_notebook_prints_what_it_shows(notebook: Path) -> None:
    async def run() -> None:
        names: dict[str, Any] = {}
        for number, (source, shown) in enumerate(cells(notebook), 1):
            assert await printed(source, names) == shown, f"cell {number}"

    asyncio.run(run())


def test_there_is_a_notebook_and_each_is_found_from_a_page() -> None:
    assert NOTEBOOKS
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (REPOSITORY / "docs").glob("*.md"))
    assert [notebook.name for notebook in NOTEBOOKS if f"notebooks/{notebook.name})" not in pages] == []
