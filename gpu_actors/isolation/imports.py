"""Imports: either side may have to import a module to read a record, because records name classes and functions.

The body of such a module may itself open a context, send records and wait for responses. So no thread waits for the
end of an import in order to read or write a record. A context's process, which runs the body again, opens no context
there.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
from collections.abc import Iterator
from typing import Any

from gpu_actors.errors import Unsupported

__all__ = ["Unpickler", "enter_child", "refuse_opening", "refuse_unfinished"]


class _Here(threading.local):
    depth = 0


_here = _Here()
_in_child = False


class Unpickler(pickle.Unpickler):
    """Finds a class or function that is already defined, without waiting for its module's import."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        defined = getattr(sys.modules.get(module_name), global_name, None)
        if defined is not None:
            return defined
        with _importing():
            return super().find_class(module_name, global_name)


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1


def enter_child() -> None:
    """Note that this process is a context's own."""
    global _in_child
    _in_child = True


def refuse_opening() -> None:
    """Raise `Unsupported` while a context's process imports a module to read a record."""
    if _in_child and _here.depth:
        reason = (
            "a module opens this context as it is imported, and a context's process imports it too: open it in a "
            "function that the program calls"
        )
        raise Unsupported("isolation", "process", reason)


def refuse_unfinished(name: object) -> None:
    """Raise PicklingError for the name of a module that is being imported: the other side would import it too."""
    parts = name.split(".") if isinstance(name, str) else []
    for end in range(1, len(parts) + 1):
        unfinished = ".".join(parts[:end])
        spec = getattr(sys.modules.get(unfinished), "__spec__", None)
        if getattr(spec, "_initializing", False):
            reason = f"the module {unfinished} is being imported, and the context's process would import it too"
            raise pickle.PicklingError(f"{reason}: do this in a function that the program calls later")
