"""What the tests of the documentation share: the pages, their Python examples, and running these as a reader would."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from service_support import REPOSITORY

PAGES = (
    REPOSITORY / "README.md",
    REPOSITORY / "CHANGELOG.md",
    REPOSITORY / "kernels_cu" / "emulation" / "README.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
)


def examples(page: Path) -> list[str]:
    """The Python examples of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def wants_torch(source: str) -> bool:
    """Whether an example is for programs with torch, which is no part of what the tests need."""
    return "from gpu_actors.interop." in source


def run_example(source: str, names: dict[str, Any], label: str) -> None:
    """Run an example in a module of these names. ``await`` may stand outside of any function, as in a notebook."""
    code = compile(source, label, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if not code.co_flags & inspect.CO_COROUTINE:
        exec(code, names)
        return

    async def main() -> None:
        waiting: Coroutine[Any, Any, None] = eval(code, names)
        await waiting

    asyncio.run(main())
