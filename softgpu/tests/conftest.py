from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

ACTIVE = bool(os.environ.get("SOFTGPU_FOLDER"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.gpu)
        if not ACTIVE:
            item.add_marker(pytest.mark.skip(reason="run by python -m softgpu -m pytest -m gpu softgpu/tests"))


@pytest.fixture
def stream() -> Iterator[int]:
    yield from _stream()


@pytest.fixture
def other() -> Iterator[int]:
    yield from _stream()


def _stream() -> Iterator[int]:
    from cupy.cuda import runtime

    made = runtime.streamCreateWithFlags(runtime.streamNonBlocking)
    yield made
    runtime.streamSynchronize(made)
    runtime.streamDestroy(made)


@pytest.fixture
def in_a_process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program with CuPy imported, in a process of its own, whose device may fail for good."""

    def run(body: str, **settings: str) -> Any:
        text = "import cupy, numpy as np\nfrom cupy.cuda import driver, runtime\nfrom softgpu import control\n"
        environment = {**os.environ, **settings}
        command = [sys.executable, "-c", text + textwrap.dedent(body)]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)

    return run
