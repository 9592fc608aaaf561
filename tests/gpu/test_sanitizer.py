"""compute-sanitizer over one candidate of each kernel: out-of-bounds accesses, races, barriers, unwritten memory."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cases.gpu_candidates import CANDIDATES

import gpu_actors as ga
from gpu_actors.errors import Unsupported

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).with_name("sanitized.py")
FOUND = 97  # the exit code if the tool finds anything
TOOL = shutil.which("compute-sanitizer")


@functools.cache
def one_of_each() -> dict[str, str]:
    """The first candidate of each kernel."""
    names: dict[str, str] = {}
    with ga.open_context("cuda") as context:
        for candidate in CANDIDATES:
            if candidate.runs_on(context.info.arch):
                try:
                    kernel = context.flash_attn.inspect_key(candidate.make().request).kernel
                except Unsupported:
                    continue
                names.setdefault(kernel, candidate.name)
    return names


@pytest.mark.timeout(300)
@pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not installed")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    names = one_of_each()
    command = [str(TOOL), "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, str(SCRIPT), *names.values()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    said = done.stdout + done.stderr
    if "Device not supported" in said:
        pytest.skip("this machine's GPU is out of the sanitizer's reach")
    assert done.returncode == 0, said[-4000:]
    assert all(f"right, by {kernel}\n" in done.stdout for kernel in names), said[-4000:]


@pytest.mark.timeout(120)
@pytest.mark.skipif(TOOL is None, reason="compute-sanitizer is not installed")
def test_the_sanitizer_does_find_an_access_out_of_bounds() -> None:
    """Otherwise a run without findings would prove nothing."""
    code = (
        "import cupy; k = cupy.RawKernel('extern \"C\" __global__ void f(float* x) { x[1 << 26] = 1; }', 'f');"
        "x = cupy.zeros(4, cupy.float32); k((1,), (1,), (x,)); cupy.cuda.runtime.deviceSynchronize()"
    )
    command = [str(TOOL), "--tool", "memcheck", "--error-exitcode", str(FOUND), sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("this machine's GPU is out of the sanitizer's reach")
    assert "Invalid __global__ write" in done.stdout + done.stderr
