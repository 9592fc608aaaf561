"""Seeds one fault into a module of the package, in each process that imports this with HOST_MUTANT set."""

from __future__ import annotations

import json
import os
from importlib.machinery import SourceFileLoader
from types import CodeType

__all__ = ["seed"]


def seed(file: str, old: str, new: str) -> None:
    """From now on that module is imported with the fault."""
    get_code = SourceFileLoader.get_code

    def changed(self: SourceFileLoader, name: str) -> CodeType | None:
        path = self.get_filename(name)
        if not path.endswith("/" + file):
            return get_code(self, name)
        text = self.get_data(path).decode()
        if old not in text:
            raise LookupError(f"{file} has no {old!r}")
        code: CodeType = compile(text.replace(old, new), path, "exec", dont_inherit=True)
        return code

    SourceFileLoader.get_code = changed  # type: ignore[method-assign,assignment]


if given := os.environ.get("HOST_MUTANT"):
    seed(*json.loads(given))
