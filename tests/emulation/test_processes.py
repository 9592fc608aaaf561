"""The emulated device beside other processes: forks, compilers, and the signals that reach them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.service import run_python

from gpu_actors.devices.emulation.toolchain import Toolchain
from gpu_actors.devices.emulation.unit import CompilerFailed, run_compiler

_FORKED = """
import ctypes, os, signal, sys, threading, time, warnings
import numpy as np
import gpu_actors as ga

warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which is the point
SPIN = '''
extern "C" __global__ void spin(int n, float* y) {
  for (int i = 0; i < n; i++) *y = *y * 1.0000001f + 1e-9f;
}
'''

def launch(ctx, turns):
    spin = ctx.kernel(SPIN, "spin").result(60.0)
    return spin.launch(grid=1, block=1, args=(turns, np.ones(1, np.float32)))

options = ga.ContextOptions(hang_timeout=20.0)
with ga.open_context("emulated", options) as ctx:
    launch(ctx, 1).result(60.0)
    endless = launch(ctx, 2_000_000_000)
    while ctx.health().oldest_launch is None:
        time.sleep(0.001)
    time.sleep(0.1)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # nothing else would end it
        with ga.open_context("emulated") as own:
            launch(own, 1).result(15.0)
        print("answered", flush=True)
        ctypes.string_at(8)  # crashes, as it would without the emulation
    print(signal.Signals(-os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).name, endless.done(), flush=True)
    os._exit(0)
"""


def test_a_child_that_is_forked_during_a_launch_launches_and_crashes_like_any_other() -> None:
    done = run_python(_FORKED)
    assert done.stdout.splitlines() == ["answered", "SIGSEGV False"], done.stderr


# The first fails if it cannot wait for its process. A shell in between would reset the inherited SIGCHLD.
_SHELL = "#!/bin/sh\nfor last; do :; done\n"
_COMPILERS = {
    "waits": f"#!{sys.executable} -IS\nimport os, sys\n"
    "os.waitpid(os.spawnlp(os.P_NOWAIT, 'true', 'true'), 0)\nopen(sys.argv[-1], 'w').write('whole')\n",
    "refuses": f"{_SHELL}echo no; exit 1\n",
    "is signalled": f"{_SHELL}for name in HUP INT QUIT TERM USR1 USR2; do kill -$name $$; done; echo whole >$last\n",
}


@pytest.fixture(params=[signal.SIG_IGN, signal.SIG_DFL], ids=["ignored", "awaited"])
def children(request: pytest.FixtureRequest) -> Iterator[None]:
    """How this process handles child processes that have ended."""
    before = signal.signal(signal.SIGCHLD, request.param)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("children")
def test_a_compiler_waits_refuses_and_is_signalled(tmp_path: Path) -> None:
    for name, text in _COMPILERS.items():
        compiler = tmp_path / name / "compiler"
        compiler.parent.mkdir()
        compiler.write_text(text)
        compiler.chmod(0o755)
        toolchain = Toolchain("g++", (str(compiler),), "1")
        try:
            run_compiler(toolchain, ["made"], compiler.parent, compiler.parent, "this")
            said = (compiler.parent / "made").read_text()
        except CompilerFailed as failure:
            said = f"failed: {failure.log}"
        assert said.strip() == ("failed: no" if name == "refuses" else "whole")
