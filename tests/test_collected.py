"""The garbage collector may end a waiting task at any moment, on any thread: nothing hangs, and nothing is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("collected.py")


@pytest.mark.parametrize("how", ["plain", "traced"])
def test_tasks_that_the_collector_ends_take_their_requests_back(how: str) -> None:
    command = [sys.executable, "-X", "faulthandler", str(SCRIPT), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
