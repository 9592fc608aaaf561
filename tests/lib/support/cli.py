"""Shared by the tests of the command gpu-actors."""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["Run", "command_line"]

Run = Callable[..., tuple[int, str, str]]
"""Runs the command in this process. Returns its exit code, standard output and standard error."""


def command_line(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "gpu_actors.cli", *map(str, arguments)]
