"""Fixtures that many tests share."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# Set before NumPy is loaded: BLAS threads that spin on busy cores make small products fifty times slower.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """How many workers ``-n auto`` starts: one more than the cores that this process may use.

    About a quarter of a run waits for processes, sockets and timers, so one worker per core would leave cores idle.

    Tests that share a GPU or a browser or compare times run in one process, without workers. So do the tests of one
    file, because workers take longer to start than they save. A sweep gets workers, even that of one file.
    """
    marks = config.option.markexpr
    if marks in ("gpu", "perf", "browser") or (marks != "sweep" and _names_one_file(config)):
        return 0
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else len(os.sched_getaffinity(0)) + 1


def _names_one_file(config: pytest.Config) -> bool:
    named = {argument.partition("::")[0] for argument in config.args}
    return len(named) == 1 and Path(*named).is_file()


def pytest_configure(config: pytest.Config) -> None:
    """If Python may write no bytecode beside its sources, workers and their child processes share it in a folder.

    Otherwise each would compile every module, and rewrite the assertions of every test, for itself.
    """
    if config.option.markexpr == "gpu" and hasattr(config, "workerinput"):
        config.pluginmanager.register(_LostContext())
    if sys.dont_write_bytecode and getattr(config.option, "tx", None):
        folder = tempfile.TemporaryDirectory(prefix="gpu-actors-bytecode-")
        patch = pytest.MonkeyPatch()
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        patch.setenv("PYTHONPYCACHEPREFIX", folder.name)
        config.add_cleanup(patch.undo)
        config.add_cleanup(folder.cleanup)


class _LostContext:
    """A kernel's fault ends the GPU's context of its process, so the worker ends after it, and xdist starts another."""

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and "cupy" in sys.modules:
            try:
                sys.modules["cupy"].cuda.runtime.deviceSynchronize()
            except Exception:  # an error of CuPy, which may not be installed
                os._exit(1)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Hide the tests from the garbage collector, which would otherwise walk through half a million objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


class _FromAnotherFile(pytest.Dir):
    """A folder that each worker begins to collect at another file."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        nodes = list(super().collect())
        worker = self.config.workerinput  # type: ignore[attr-defined]
        first = len(nodes) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        return nodes[first:] + nodes[:first]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Workers start at once. Each begins at another file, so that it finds most files with rewritten assertions."""
    if not hasattr(parent.config, "workerinput"):
        return None
    return _FromAnotherFile.from_parent(parent, path=path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that need a GPU unless ``-m`` names the mark, so that ``-m sweep`` runs without a GPU.

    Sweeps and tests on a GPU get five minutes a test if they state no limit of their own.
    """
    if hasattr(config, "workerinput"):  # xdist requires one order
        items.sort(key=lambda item: item.path)
    if "gpu" not in config.option.markexpr:
        on_a_gpu = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=on_a_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
    for item in items:
        if item.get_closest_marker("timeout") is None and any(map(item.get_closest_marker, ("sweep", "gpu"))):
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def shared_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder that all processes of this run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if hasattr(request.config, "workerinput") else own


@pytest.fixture(autouse=True, scope="session")
def _cache_folder(shared_folder: Path) -> Iterator[Path]:
    """Keep the user's own cubins out of the tests, and the tests' out of the user's.

    GPU_ACTORS_TEST_CACHE_DIR: a folder that several runs of the tests share.
    """
    given = os.environ.get("GPU_ACTORS_TEST_CACHE_DIR")
    folder = Path(given) if given else shared_folder / "cubins"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPU_ACTORS_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(autouse=True, scope="session")
def _bytecode(shared_folder: Path) -> Iterator[None]:
    """As `pytest_configure`, for the processes that tests start in a run without workers."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.dont_write_bytecode:
            patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
            patch.setenv("PYTHONPYCACHEPREFIX", str(shared_folder / "bytecode"))
        yield


@pytest.fixture
def all_threads_end() -> Iterator[None]:
    """Fail a test that leaves a thread behind."""
    from support.service import no_threads_left

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
    """Closing a context waits a minute for work that does not end, so that a test can tell whether it waited at all."""
    from inside.actors import context
    from inside.handles import gpu_context

    monkeypatch.setattr(gpu_context, "_CLOSE_SECONDS", 60.0)
    monkeypatch.setattr(context, "_DRAIN_SECONDS", 60.0)


@pytest.fixture
def fused() -> Iterator[None]:
    """Build emulated kernels with products fused into sums, and compute with the hardware's errors."""
    from emulated.contraction import fused_products, like_hardware

    with fused_products(), like_hardware():
        yield


@pytest.fixture(params=[False, True], ids=["separate", "fused"])
def fused_or_not(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run a test with emulated kernels whose products are fused into sums, and with separate ones."""
    from emulated.contraction import fused_products

    with fused_products(request.param):
        yield


@pytest.fixture(autouse=True)
def _sweeps_compute_like_hardware(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sweeps compute with the hardware's errors, the worst arithmetic that there is."""
    from emulated.contraction import like_hardware

    with like_hardware() if request.node.get_closest_marker("sweep") else contextlib.nullcontext():
        yield


@pytest.fixture
def fresh_workers() -> None:
    """Forget what an earlier test made the workers do."""
    from support.supervision import Sibling, Worker

    for worker in (Worker, Sibling):
        worker.incarnations = 0
        worker.openings = staticmethod(lambda number: None)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command gpu-actors in this process. Returns its exit code, standard output and standard error."""
    from gpu_actors.cli import main

    # In a worker of pytest-xdist, readline sets COLUMNS to 80.
    monkeypatch.delenv("COLUMNS", raising=False)

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
