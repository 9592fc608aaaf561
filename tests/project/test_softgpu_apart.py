"""The software driver is for tests: the package does not find it, and it stays in step with the package."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from inside.devices import choose_device
from support.service import KERNELS_CU, REPOSITORY


def test_auto_does_not_see_it() -> None:
    """This process is started without it, and does not find a driver that is built and cached on this machine."""
    assert "softgpu" not in Path("/proc/self/maps").read_text()
    choose_device("auto")
    assert "softgpu" not in Path("/proc/self/maps").read_text()


def test_its_worker_fills_every_field_that_emulated_kernels_read() -> None:
    """Otherwise only tests that need CuPy build the worker, which shares structs with kernels_cu/emulation."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the driver is built by g++")
    flags = ("-fsyntax-only", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{KERNELS_CU}")
    sources = sorted((REPOSITORY / "softgpu" / "worker").glob("*.cpp"))
    done = subprocess.run([compiler, *flags, *sources], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
