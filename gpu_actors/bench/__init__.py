"""Benchmarks for ``gpu-actors bench``: each of SUITES is a function that returns figures.

The GPU suites use the other modules: stage opens the device, and suite checks and times each case.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_actors._version import __version__
from gpu_actors.extras import version_of

__all__ = ["SUITES", "environment", "in_rows"]

SUITES = {
    "backward": "stage.backward",
    "bridge": "bridge.run",
    "compile": "compile.run",
    "decode": "stage.decode",
    "forward": "stage.forward",
    "host": "host.run",
    "imports": "imports.run",
    "plan": "plan.run",
    "serve": "serve.run",
}
"""The module and function of each suite."""

_LIBRARIES = ("numpy", "pykka", "anyio", "uvloop", "cupy-cuda13x", "nvidia-cuda-nvrtc", "uvicorn", "starlette")


def environment() -> dict[str, object]:
    """The time, the machine and the versions of a measurement."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "gpu_actors": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "load": [round(value, 2) for value in os.getloadavg()] if sys.platform != "win32" else None,
        **{name: version_of(name) for name in _LIBRARIES},
    }


def in_rows(figures: Mapping[str, Any]) -> str:
    """Figures as JSON with a line for each name, and a line for each row of a table."""
    lines = [f"  {json.dumps(name)}: {_in_rows(value)}" for name, value in figures.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _in_rows(value: Any) -> str:
    def line(each: Any) -> str:
        return json.dumps(each, ensure_ascii=False, allow_nan=False)

    if isinstance(value, dict) and any(isinstance(each, dict) for each in value.values()):
        rows, ends = [f"    {line(name)}: {line(each)}" for name, each in value.items()], "{}"
    elif isinstance(value, (list, tuple)) and any(isinstance(each, dict) for each in value):
        rows, ends = [f"    {line(each)}" for each in value], "[]"
    else:
        return line(value)
    return "\n".join([ends[0], ",\n".join(rows), f"  {ends[1]}"])


def _cpu() -> str:
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    match = re.search(r"^model name\s*: (.*)$", cpuinfo, re.MULTILINE)
    return match[1] if match else platform.processor()
