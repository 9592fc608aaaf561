"""One Ray cluster on this machine for the tests of this folder, and the conformance suites of the other channels.

Run by its own command, ``python -m pytest tests/on_ray -n 0``, where Ray is installed.
"""

from __future__ import annotations

import os
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

# Read when Ray is imported.
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled", RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")

HERE = Path(__file__).parent
LIMIT = 120.0
SUITES = ("distributed/remote", "isolation", "distributed")

for name in SUITES:
    sys.path.append(str(HERE.parent / name))
pytest.register_assert_rewrite(
    "test_head_split",
    "test_isolation_conformance",
    "test_over_each_channel",
    "test_remote_conformance",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests here more time: Ray takes a minute to start on a busy machine, and starts processes for everything."""
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Ray, with more CPUs than the machine has, because tests compute almost nothing."""
    ray = pytest.importorskip("ray")
    folder = tempfile.mkdtemp(prefix="ray")  # short, because a socket's path has a limit
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    over = _start(ray, folder)
    yield ray
    ray.shutdown()
    over.set()
    _, left = psutil.wait_procs(
        [each for each in psutil.Process().children(recursive=True) if each.pid not in before and not _is_own(each)],
        60.0,
    )
    shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"Ray left {left}"


def _is_own(process: psutil.Process) -> bool:
    """Whether the process is the parent of isolated contexts' processes, which stays."""
    try:
        return any("gpu_actors.isolation.zygote" in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _start(ray: Any, folder: str) -> threading.Event:
    # For all of Ray's processes, Serve's controller included.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    end = time.monotonic() + LIMIT
    reason = "it did not return"
    told: queue.Queue[str | None] = queue.Queue()
    over = threading.Event()

    def start() -> None:
        try:
            ray.init(
                num_cpus=16,
                include_dashboard=False,
                object_store_memory=256 << 20,
                logging_level="error",
                log_to_driver=False,
                _temp_dir=folder,
            )
        except Exception as error:  # a raylet aborts on a very busy machine
            told.put(f"{type(error).__name__}: {error}")
        else:
            told.put(None)
            over.wait()  # Ray's processes end with the thread that started them

    while (left := end - time.monotonic()) > 0:
        threading.Thread(target=start, name="ray-init", daemon=True).start()
        try:
            failure = told.get(timeout=left)
        except queue.Empty:
            break
        if failure is None:
            return over
        reason = failure
    pytest.skip(f"Ray does not start within {LIMIT:g} s here: {reason}")
