"""Runs tests of another folder with the fixtures of the folder that adopts them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection
from typing import Any

__all__ = ["adopt"]


def adopt(module: str, fixtures: set[str], into: dict[str, Any], leave: Collection[str] = ()) -> None:
    """Add to ``into`` the tests of a module that use one of these fixtures, which ``into`` defines itself."""
    for name, function in vars(importlib.import_module(module)).items():
        if not name.startswith("test_") or name in leave:
            continue
        if fixtures & set(inspect.signature(function).parameters):
            assert name not in into
            into[name] = function
