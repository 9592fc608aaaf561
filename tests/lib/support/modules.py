"""Modules outside of packages: scripts, examples, the runner of the GPU tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def module_at(path: Path) -> Any:
    """The module in that file, executed again."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # its dataclasses look it up there
    spec.loader.exec_module(module)
    return module
