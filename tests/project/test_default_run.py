"""How pytest spreads the tests: over all cores by default, and not at all where they share a GPU or compare times."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from support.service import REPOSITORY

TWO_FILES = ("tests/project/test_test_names.py", "tests/project/test_imports.py")
CORES = len(os.sched_getaffinity(0))


def said_by_pytest(*arguments: str) -> str:
    """What a run that picks no test says: it has started its workers, and they have collected."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "no_test_of_this_name", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=REPOSITORY, timeout=50, check=False, env=inherited
    )
    assert done.returncode == 5, done.stdout + done.stderr  # no tests were collected
    return done.stdout


def test_the_default_run_has_a_worker_for_each_core() -> None:
    assert re.search(rf"created: {CORES}/{CORES} workers", said_by_pytest(*TWO_FILES))


@pytest.mark.parametrize("arguments", [TWO_FILES[:1], ("-m", "perf", *TWO_FILES), ("-m", "gpu", *TWO_FILES)])
def test_one_file_a_gpus_tests_and_those_that_compare_times_run_in_one_process(arguments: tuple[str, ...]) -> None:
    assert "workers" not in said_by_pytest(*arguments)
