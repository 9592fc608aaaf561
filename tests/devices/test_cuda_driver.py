"""The driver is started and a device's context is made while other threads run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_actors.devices.emulation.toolchain import Toolchain

# A driver that says that it was called, and returns once another thread of the program has answered.
DRIVER = """
#include <stdlib.h>
#include <unistd.h>

static bool answered() {
  char byte = 'x';
  return write(atoi(getenv("CALLED")), &byte, 1) == 1 && read(atoi(getenv("ANSWERED")), &byte, 1) == 1;
}

#define CALL extern "C" __attribute__((visibility("default"))) int
CALL cuInit(unsigned flags) { return flags == 0 && answered() ? 0 : 3; }
CALL cuDeviceGet(int* device, int ordinal) { *device = 40 + ordinal; return 0; }
CALL cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = context;
  return device == 43 && answered() ? 0 : 101;
}
"""

PROGRAM = """
import os, threading, types
from gpu_actors.devices.cuda import cupy_api, cuda_usable
from cupy.cuda import runtime

def answer():
    while os.read(called, 1):
        answers.append(1)
        os.write(answered, b"x")

(called, in_call), (in_driver, answered) = os.pipe(), os.pipe()
os.environ.update(CALLED=str(in_call), ANSWERED=str(in_driver))
answers, devices = [], []
threading.Thread(target=answer, daemon=True).start()
runtime.getDeviceCount = lambda: 4
print(cuda_usable(3), len(answers))
cupy_api.runtime = types.SimpleNamespace(setDevice=lambda index: devices.append((index, len(answers))))
api = cupy_api.CupyApi(3)
api.bind()
api.bind()
print(*devices)
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder with the driver's library in it."""
    compiler = Toolchain.find()
    source = tmp_path / "driver.cpp"
    source.write_text(DRIVER)
    command = [*compiler.command, *compiler.flags, str(source), "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(command, check=True, timeout=200)
    return tmp_path


def test_other_threads_run_while_the_driver_starts_and_a_context_is_made(library: Path) -> None:
    """A call that held the interpreter's lock would never be answered."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.stdout.splitlines() == ["None 1", "(3, 3) (3, 3)"], done.stdout + done.stderr
