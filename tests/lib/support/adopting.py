"""Tests of other folders, taken over with fixtures of this one."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection
from typing import Any

__all__ = ["adopt"]


def adopt(module: str, fixtures: set[str], into: dict[str, Any], leave: Collection[str] = ()) -> None:
    """Take over the tests of a module that use one of these fixtures, which ``into`` defines anew."""
    for name, function in vars(importlib.import_module(module)).items():
        if not name.startswith("test_") or name in leave:
            continue
        if fixtures & set(inspect.signature(function).parameters):
            assert name not in into
            into[name] = function
