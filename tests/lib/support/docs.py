"""Shared by tests of the documentation: the pages, their Python examples, and running these as a reader would."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import warnings
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from support.service import REPOSITORY

import gpu_actors as ga

PAGES = (
    REPOSITORY / "README.md",
    REPOSITORY / "CHANGELOG.md",
    REPOSITORY / "CONTRIBUTING.md",
    REPOSITORY / "SECURITY.md",
    REPOSITORY / "kernels_cu" / "emulation" / "README.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
)


def examples(page: Path) -> list[str]:
    """The Python examples of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def wants_torch(source: str) -> bool:
    """Whether an example says that it needs torch, JAX or Ray, which the tests' extra does not install."""
    return source.startswith(("# needs torch", "# needs jax", "# needs ray"))


def run_example(source: str, names: dict[str, Any], label: str) -> None:
    """Run an example in a module of these names. ``await`` may be outside of any function, as in a notebook."""
    with warnings.catch_warnings():
        # Pages say "auto", and there may be no GPU here.
        warnings.simplefilter("ignore", ga.MockDeviceWarning)
        _run(source, names, label)


def _run(source: str, names: dict[str, Any], label: str) -> None:
    code = compile(source, label, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if not code.co_flags & inspect.CO_COROUTINE:
        exec(code, names)
        return

    async def main() -> None:
        waiting: Coroutine[Any, Any, None] = eval(code, names)
        await waiting

    asyncio.run(main())
