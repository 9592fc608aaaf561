"""Benchmarks: each module is a suite with a ``run() -> dict`` and is run by ``gpu-actors bench``."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
import time

from gpu_actors._version import __version__

__all__ = ["environment"]

_LIBRARIES = ("numpy", "pykka", "anyio", "uvloop", "cupy-cuda13x", "nvidia-cuda-nvrtc")


def environment() -> dict[str, object]:
    """When, where and with what a figure was measured."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "gpu_actors": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "load": [round(value, 2) for value in os.getloadavg()] if sys.platform != "win32" else None,
        **{name: _version(name) for name in _LIBRARIES},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
