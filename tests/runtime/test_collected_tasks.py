"""If the garbage collector ends a waiting task on any thread, nothing hangs and no request is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "lib/support/collected.py"


def test_tasks_that_the_collector_ends_take_their_requests_back() -> None:
    command = [sys.executable, "-X", "faulthandler", str(SCRIPT)]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
