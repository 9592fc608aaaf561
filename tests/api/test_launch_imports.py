"""The device's opening imports what launches need: a child forked in the middle of an import cannot finish it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

FORK_IN_THE_FIRST_REQUEST = """
import os, signal, threading, time
from importlib.machinery import SourceFileLoader
import numpy as np
import gpu_actors as ga

def ask(ctx):
    {ask}

def late(loader, module):
    '''The first module that another thread imports is held up until the process has forked.'''
    if threading.current_thread() is not threading.main_thread() and not importing.is_set():
        importing.set()
        forked.wait({patience})
    execute(loader, module)

execute = SourceFileLoader.exec_module
importing, forked = threading.Event(), threading.Event()
x = np.ones((1, 3, 2, 16), np.float32)
KERNEL = 'extern "C" __global__ void k(int* p) {{ p[0] = 1; }}'
with ga.open_context("mock") as ctx:
    SourceFileLoader.exec_module = late
    reply = ask(ctx)
    while not (importing.is_set() or reply.done()):
        time.sleep(0.001)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        SourceFileLoader.exec_module = execute
        with ga.open_context("mock") as own:
            ask(own).result(15)
        os._exit(0)
    forked.set()
    reply.result(60)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.timeout(180)  # the emulated device builds its executor in a new cache
@pytest.mark.parametrize("device", ["mock", "emulated", "cuda"])
def test_no_request_imports_a_module(device: str, tmp_path: Path) -> None:
    script = TESTS / "lib" / "support" / "launch_imports.py"
    environment = {**os.environ, "PYTHONPATH": str(TESTS / "lib")}
    command = [sys.executable, str(script), device, str(tmp_path / "cache")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    imported = json.loads(done.stdout.splitlines()[-1])
    assert len(imported) > 10
    assert {request: modules for request, modules in imported.items() if modules} == {}


# A request, and how many seconds its first import waits for the fork. A fork waits for an import of NVRTC.
IN_FLIGHT = {
    "launch": ("return ctx.flash_attn.forward(x, x, x)", 60),
    "compile": ("return ctx.nvrtc.compile(ga.KernelSource('k.cu', KERNEL, ('k',)))", 2),
}


@pytest.mark.parametrize("request_", IN_FLIGHT)
def test_a_child_forked_in_the_first_request_answers_requests_of_its_own(request_: str, tmp_path: Path) -> None:
    ask, patience = IN_FLIGHT[request_]
    code = FORK_IN_THE_FIRST_REQUEST.format(ask=ask, patience=patience)
    environment = {**os.environ, "GPU_ACTORS_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=TESTS.parent, env=environment
    )
    assert done.stdout.split() == ["0"], done.stdout + done.stderr
