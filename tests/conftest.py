"""Fixtures that many tests share."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before NumPy is loaded: BLAS threads that spin for each other on busy cores make small products fifty times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the user's own cubins out of the tests, and the tests' out of the user's.

    GPU_ACTORS_TEST_CACHE_DIR: a folder that several runs of the tests share.
    """
    shared = os.environ.get("GPU_ACTORS_TEST_CACHE_DIR")
    folder = Path(shared) if shared else tmp_path_factory.mktemp("cubins")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPU_ACTORS_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture
def all_threads_end() -> Iterator[None]:
    """Fail a test that leaves a thread behind."""
    from service_support import no_threads_left

    with no_threads_left():
        yield


@pytest.fixture
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """While it is entered, no thread can be started, as on a machine that has run out of them."""

    @contextlib.contextmanager
    def exhausted() -> Iterator[None]:
        def start(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            yield

    return exhausted


@pytest.fixture
def patient_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing a context waits a minute for what does not end, so that a test can tell whether it waited at all."""
    for module in ("gpu_actors.context", "gpu_actors.actors.context"):
        monkeypatch.setattr(f"{module}._PATIENCE", 60.0)


@pytest.fixture
def fresh_workers() -> None:
    """Forget what an earlier test made the workers do."""
    from supervision_support import Sibling, Worker

    for worker in (Worker, Sibling):
        worker.incarnations = 0
        worker.openings = staticmethod(lambda number: None)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command gpu-actors in this process. Gives its exit code, standard output and standard error."""
    from gpu_actors.cli import main

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gpu-actors", *map(str, arguments)])
        code: Any = 0
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
