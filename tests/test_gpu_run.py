"""tests/gpu/run.py with steps that need no GPU: it never says that something passed which was not run."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from service_support import eventually

PATH = Path(__file__).with_name("gpu") / "run.py"

PASSES = "def test_a(): pass\ndef test_b(): pass\n"
FAILS = "def test_a(): pass\ndef test_b(): assert False\n"
SKIPS = "import pytest\n@pytest.mark.skip\ndef test_a(): pass\n"
HANGS = "import time\ndef test_a(): pass\ndef test_b():\n    open({begun!r}, 'w').close()\n    time.sleep(600)\n"
DIES = "import os\ndef test_a(): os._exit(0)\n"
BROKEN = "import nothing_of_this_name\n"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("gpu_run", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_run", module)
    spec.loader.exec_module(module)
    # Set, so that what `main` sets is taken back.
    monkeypatch.setenv("GPU_ACTORS_TEST_CACHE_DIR", "unused")
    monkeypatch.setenv("GPU_ACTORS_CACHE_DIR", "unused")
    return module


Command = Callable[[Any, Path, float], list[str]]


def pytest_of(texts: dict[str, str], folder: Path) -> Command:
    def command(step: Any, out: Path, seconds: float) -> list[str]:
        path = folder / f"test_{step.name}.py"
        path.write_text(texts[step.name])
        options = ["-q", "-p", "no:cacheprovider", f"--rootdir={folder}", "-c", "/dev/null"]
        return [sys.executable, "-m", "pytest", *options, f"--junitxml={out / step.name}.xml", str(path)]

    return command


def steps_of(run: Any, *names: str, kind: str = "tests", seconds: float = 60.0) -> list[Any]:
    return [run.Step(name, kind, (), seconds) for name in names]


def test_each_way_a_step_ends_is_told_apart_and_all_are_run(run: Any, tmp_path: Path) -> None:
    texts = {"fails": FAILS, "skips": SKIPS, "broken": BROKEN, "dies": DIES, "passes": PASSES}
    steps = steps_of(run, *texts)
    code = run.main(["--out", str(tmp_path)], steps, pytest_of(texts, tmp_path), lambda: None)
    found = json.loads((tmp_path / "summary.json").read_text())
    assert (code, found["passed"]) == (1, False)
    assert {step["name"]: step["status"] for step in found["steps"]} == {
        "fails": "failed",
        "skips": "nothing ran",
        "broken": "failed",
        "dies": "nothing ran",
        "passes": "passed",
    }
    assert [step["executed"] for step in found["steps"]] == [2, 0, 1, 0, 2]
    assert found["steps"][0]["failures"] == ["test_fails::test_b"]
    assert (tmp_path / "passes.log").read_text()


@pytest.fixture
def ignored_interrupts() -> Iterator[None]:
    """As in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ignored_interrupts")
def test_a_step_that_hangs_is_cut_off_with_what_it_had_and_the_rest_go_on(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, limit = tmp_path / "begun", 0.5

    class Process(subprocess.Popen[bytes]):
        """Its time begins to run when its test hangs: pytest itself may take long to start."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout == limit:
                eventually(begun.exists, 60.0)
            return super().wait(timeout)

    monkeypatch.setattr(run.subprocess, "Popen", Process)
    texts = {"hangs": HANGS.format(begun=str(begun)), "passes": PASSES}
    steps = [*steps_of(run, "hangs", seconds=limit), *steps_of(run, "passes")]
    assert run.main(["--out", str(tmp_path)], steps, pytest_of(texts, tmp_path), lambda: None) == 1
    hung, passed = json.loads((tmp_path / "summary.json").read_text())["steps"]
    assert (hung["status"], hung["executed"] >= 1) == ("cut off", True)
    assert passed["status"] == "passed"


def test_everything_passing_is_the_only_success(run: Any, tmp_path: Path) -> None:
    steps = steps_of(run, "passes")
    assert run.main(["--out", str(tmp_path)], steps, pytest_of({"passes": PASSES}, tmp_path), lambda: None) == 0
    assert json.loads((tmp_path / "summary.json").read_text())["passed"] is True


def test_what_no_time_was_left_for_has_not_passed(run: Any, tmp_path: Path) -> None:
    (tmp_path / "passes.xml").write_text("<testsuites><testsuite tests='9'/></testsuites>")
    command = pytest_of({"passes": PASSES}, tmp_path)
    code = run.main(["--out", str(tmp_path), "--minutes", "0"], steps_of(run, "passes"), command, lambda: None)
    (step,) = json.loads((tmp_path / "summary.json").read_text())["steps"]
    assert (code, step["status"], step["executed"]) == (1, "not run", 0)


def test_an_earlier_runs_results_are_not_taken_for_this_ones(run: Any, tmp_path: Path) -> None:
    (tmp_path / "dies.xml").write_text("<testsuites><testsuite tests='9'/></testsuites>")
    assert run.main(["--out", str(tmp_path)], steps_of(run, "dies"), pytest_of({"dies": DIES}, tmp_path), lambda: None)
    (step,) = json.loads((tmp_path / "summary.json").read_text())["steps"]
    assert (step["status"], step["executed"]) == ("nothing ran", 0)


ROW = {"case": {"name": "case"}, "reason": "because"}


@pytest.mark.parametrize(
    ("rows", "code", "status"),
    [
        ([("gpu_actors kernel", "timed"), ("torch", "failed")], 0, "passed"),
        ([("gpu_actors kernel", "timed"), ("gpu_actors kernel", "wrong")], 1, "failed"),
        ([("gpu_actors kernel", "unsupported")], 0, "nothing ran"),
        ([("torch", "timed")], 0, "nothing ran"),
        ([("gpu_actors kernel", "timed")], 1, "failed"),
        (None, 0, "nothing ran"),
        (None, 1, "failed"),
    ],
)
def test_a_benchmark_passes_only_with_kernels_of_ours_timed(
    run: Any, tmp_path: Path, rows: list[tuple[str, str]] | None, code: int, status: str
) -> None:
    def command(step: Any, out: Path, seconds: float) -> list[str]:
        found = None if rows is None else [{**ROW, "subject": subject, "status": how} for subject, how in rows]
        write = "" if found is None else f"open({str(out / 'b.json')!r}, 'w').write({json.dumps({'rows': found})!r});"
        return [sys.executable, "-c", f"{write}raise SystemExit({code})"]

    run.main(["--out", str(tmp_path)], steps_of(run, "b", kind="bench"), command, lambda: None)
    (step,) = json.loads((tmp_path / "summary.json").read_text())["steps"]
    assert step["status"] == status


def test_without_a_gpu_nothing_is_said_to_have_run(tmp_path: Path) -> None:
    command = [sys.executable, str(PATH), "--out", str(tmp_path), "--only", "conformance", "bench-forward"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env={"PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 1, done.stderr
    assert "nothing was run" in done.stdout
    found = json.loads((tmp_path / "summary.json").read_text())
    assert [step["status"] for step in found["steps"]] == ["not run"] * 2
    assert found["passed"] is False


def test_every_step_names_files_that_are_there_and_suites_that_are_known(run: Any) -> None:
    named = {argument for step in run.STEPS if step.kind == "tests" for argument in step.arguments}
    assert all((run.ROOT / name).exists() for name in named)
    files = {f"tests/gpu/{path.name}" for path in PATH.parent.glob("test_*.py")}
    assert files <= named, "a file of tests is in no step"
    from gpu_actors.cli.bench import _suites

    assert {step.arguments[0] for step in run.STEPS if step.kind == "bench"} <= set(_suites())
    for step in run.STEPS:
        assert run.real_command(step, Path("/tmp"), 60.0)[0] == sys.executable


def test_a_file_of_tests_that_no_step_names_is_run_all_the_same(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_NAMED", tuple(step for step in run._NAMED if step.name != "kernels"))
    (others,) = run._others()
    assert others.arguments == ("tests/gpu/test_kernels.py",)
