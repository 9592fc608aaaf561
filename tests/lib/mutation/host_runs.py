"""Runs tests with a fault in one module of the package, each time in a child of a process that has imported the rest.

Reads a line of JSON for each run from standard input: file, old, new, nodes, seconds, limit, and marks, which pytest's
-m takes. Answers each with a line: the exit code, None where the time was over, and what pytest has said.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import cupy  # noqa: F401
import pytest

_OPTIONS = ("-n", "0", "-x", "-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:randomly")


def child(run: dict[str, Any], output: int) -> NoReturn:
    os.setsid()
    for file in (1, 2):
        os.dup2(output, file)
    sys.dont_write_bytecode = True
    # For the processes that a test starts, too.
    os.environ["HOST_MUTANT"] = json.dumps([run["file"], run["old"], run["new"]])
    os.environ["SOFTGPU_PRELOAD"] = "mutation.host_seed"
    importlib.import_module("mutation.host_seed")
    code: Sequence[str] | int = pytest.main(
        [*_OPTIONS, "-m", run["marks"], "--timeout", str(run["seconds"]), *run["nodes"]]
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))  # type: ignore[arg-type]


def supervise(run: dict[str, Any]) -> tuple[int | None, str]:
    with tempfile.TemporaryFile() as output:
        process = os.fork()
        if process == 0:
            child(run, output.fileno())
        until = time.monotonic() + run["limit"]
        code: int | None = None
        while time.monotonic() < until:
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                code = os.waitstatus_to_exitcode(status)
                break
            time.sleep(0.02)
        else:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
        output.seek(0)
        return code, output.read().decode(errors="replace")


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(json.dumps(supervise(json.loads(line))) + "\n")
        sys.stdout.flush()
