"""tests/gpu/run.py with steps that need no GPU: it never reports a step that did not run as passed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.modules import module_at
from support.service import eventually

PATH = Path(__file__).parents[1] / "gpu" / "run.py"

PASSES = "def test_a(): pass\ndef test_b(): pass\n"
FAILS = "def test_a(): pass\ndef test_b(): assert False\n"
SKIPS = "import pytest\n@pytest.mark.skip\ndef test_a(): pass\n"
HANGS = "import time\ndef test_a(): pass\ndef test_b():\n    open({begun!r}, 'w').close()\n    time.sleep(600)\n"
DIES = "import os\nos._exit(0)\n"
BROKEN = "import nothing_of_this_name\n"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = module_at(PATH)
    # Set here, so that monkeypatch also undoes what `main` sets.
    monkeypatch.setenv("GPU_ACTORS_TEST_CACHE_DIR", "unused")
    monkeypatch.setenv("GPU_ACTORS_CACHE_DIR", "unused")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the steps' own pytest then starts in half the time
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
    tests, scripts = pytest_of(texts, tmp_path), script_of(texts)

    def command(step: Any, work: Path, seconds: float) -> list[str]:
        return (scripts if step.name == "dies" else tests)(step, work, seconds)

    code = run.main(["--out", str(tmp_path)], {"part": steps_of(run, *texts)}, command, lambda: None)
    found = summary(tmp_path)
    assert (code, found["passed"]) == (1, False)
    statuses = ["failed", "nothing ran", "failed", "nothing ran", "passed"]
    assert [(step["name"], step["status"]) for step in found["steps"]] == [*zip(texts, statuses, strict=True)]
    assert [step["executed"] for step in found["steps"]] == [2, 0, 1, 0, 2]
    assert found["steps"][0]["failures"] == ["test_fails::test_b"]
    assert unpacked(tmp_path)["passes.log"]


@pytest.fixture
def ignored_interrupts() -> Iterator[None]:
    """SIGINT is ignored, as in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ignored_interrupts")
def test_a_step_that_hangs_is_cut_off_with_what_it_had_and_the_rest_go_on(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, limit = tmp_path / "begun", 0.5

    class Process(subprocess.Popen[bytes]):
        """The time limit begins when the test hangs, because pytest itself may start slowly."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout == limit:
                eventually(begun.exists, 60.0)
            return super().wait(timeout)

    monkeypatch.setattr(run.subprocess, "Popen", Process)
    texts = {"hangs": HANGS.format(begun=str(begun))}
    tests, scripts = pytest_of(texts, tmp_path), script_of({"passes": TIMED})

    def command(step: Any, out: Path, seconds: float) -> list[str]:
        return (tests if step.kind == "tests" else scripts)(step, out, seconds)

    steps = [*steps_of(run, "hangs", seconds=limit), *steps_of(run, "passes", kind="bench")]
    assert run.main(["--out", str(tmp_path)], {"part": steps}, command, lambda: None) == 1
    hung, passed = summary(tmp_path)["steps"]
    assert (hung["status"], hung["executed"] >= 1) == ("cut off", True)
    assert passed["status"] == "passed"


def test_an_earlier_runs_results_are_not_taken_for_this_ones(run: Any, tmp_path: Path) -> None:
    for name in ("summary.json", "results.tar.gz", "bench-forward.png"):
        (tmp_path / name).write_text("of an earlier run")
    parts = {"part": steps_of(run, "dies", kind="bench")}
    assert run.main(["--out", str(tmp_path)], parts, script_of({"dies": DIES}), lambda: None)
    (step,) = summary(tmp_path)["steps"]
    assert (step["status"], step["executed"]) == ("nothing ran", 0)
    assert not (tmp_path / "bench-forward.png").exists()
    assert list(unpacked(tmp_path)) == ["dies.log"]


def summary(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return found


def unpacked(out: Path) -> dict[str, bytes]:
    found = {}
    with tarfile.open(out / "results.tar.gz") as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            found[member.name] = file.read()
    return found


def script_of(texts: dict[str, str]) -> Command:
    """Each step runs Python code, which may write to the paths RESULT and PLOT."""

    def command(step: Any, work: Path, seconds: float) -> list[str]:
        paths = {"RESULT": work / f"{step.name}.json", "PLOT": work / f"{step.name}.png"}
        given = "".join(f"{name} = {str(path)!r}\n" for name, path in paths.items())
        return [sys.executable, "-c", given + texts[step.name]]

    return command


TIMED = 'open(RESULT, \'w\').write(\'{"rows": [{"subject": "gpu_actors", "status": "timed"}]}\')\n'


def test_the_folder_gets_a_summary_an_archive_and_plots_alone(run: Any, tmp_path: Path) -> None:
    out = tmp_path / "found"
    names = [step.name for step in run.PARTS["benchmarks"]]
    texts = dict.fromkeys(names, TIMED + "open(PLOT, 'w').write('plot')\nprint('measured')\n")
    parts = {"benchmarks": steps_of(run, *names, kind="bench")}
    assert run.main(["--out", str(out)], parts, script_of(texts), lambda: None) == 0
    assert summary(out)["passed"] is True
    files = sorted(path.relative_to(out).as_posix() for path in out.rglob("*"))
    assert files == sorted(["summary.json", "results.tar.gz", *(f"{name}.png" for name in names)])
    found = unpacked(out)
    assert sorted(found) == sorted(f"{name}.{kind}" for name in names for kind in ("json", "log"))
    assert found[f"{names[0]}.log"].endswith(b"measured\n")


def test_what_is_known_is_written_after_each_step(run: Any, tmp_path: Path) -> None:
    """The second step reads the results so far, as they would be if the command were killed then."""
    look = f"import shutil; shutil.copytree({str(tmp_path / 'found')!r}, {str(tmp_path / 'seen')!r})\n"
    texts = {"first": TIMED, "second": look + TIMED, "third": TIMED}
    parts = {"part": steps_of(run, *texts, kind="bench")}
    assert run.main(["--out", str(tmp_path / "found")], parts, script_of(texts), lambda: None) == 0
    seen = summary(tmp_path / "seen")
    assert [step["status"] for step in seen["steps"]] == ["passed", "not run", "not run"]
    assert seen["passed"] is False
    assert sorted(unpacked(tmp_path / "seen")) == ["first.json", "first.log"]
    assert sorted(path.name for path in (tmp_path / "seen").iterdir()) == ["results.tar.gz", "summary.json"]


def test_the_archive_takes_the_end_of_a_long_log(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MOST_LOG", 1000)
    texts = {"talks": TIMED + "print('x' * 5000 + 'the end')\n"}
    run.main(["--out", str(tmp_path)], {"part": steps_of(run, "talks", kind="bench")}, script_of(texts), lambda: None)
    log = unpacked(tmp_path)["talks.log"]
    assert log.endswith(b"xthe end\n")
    assert b"bytes are left out" in log
    assert len(log) < 1100


def test_each_part_fits_a_command_of_nine_minutes(run: Any) -> None:
    options, chosen = run._options(["--out", "found"], run.PARTS)
    assert options.minutes == 9
    assert list(chosen) == ["doctor", "kernels", "service", "benchmarks"]
    for steps in chosen.values():
        assert sum(step.seconds for step in steps) + run.PATIENCE <= 60 * options.minutes
    names = [step.name for steps in chosen.values() for step in steps]
    assert len(set(names)) == len(names)


def test_a_part_and_its_steps_are_picked_by_name(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def picked(*arguments: str) -> dict[str, list[str]]:
        _, chosen = run._options(["--out", "found", *arguments], run.PARTS)
        return {part: [step.name for step in steps] for part, steps in chosen.items()}

    assert picked("--part", "benchmarks") == {"benchmarks": ["bench-forward", "bench-decode", "bench-backward"]}
    assert picked("--part", "service", "--only", "torch", "graphs") == {"service": ["graphs", "torch"]}
    only = {"doctor": [], "kernels": ["kernels"], "service": ["torch"], "benchmarks": []}
    assert picked("--only", "torch", "kernels") == only
    for wrong in (["--part", "nothing"], ["--part", "kernels", "--only", "torch"], ["--only", "nothing"]):
        with pytest.raises(SystemExit):
            picked(*wrong)
        assert wrong[-1] in capsys.readouterr().err


def test_each_part_has_its_own_minutes(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Clock:
        def __getattr__(self, name: str) -> Any:
            return (lambda: now[0]) if name == "monotonic" else getattr(time, name)

    def late(step: Any, work: Path, command: list[str], seconds: float) -> Any:
        now[0] += 60 * 9
        return run.Outcome(step.name, "passed", executed=1)

    monkeypatch.setattr(run, "time", Clock())
    monkeypatch.setattr(run, "run_step", late)
    parts = {"first": steps_of(run, "a", "b"), "second": steps_of(run, "c", "d")}
    assert run.main(["--out", str(tmp_path)], parts, lambda *_: [], lambda: None) == 1
    steps = summary(tmp_path)["steps"]
    assert [(step["name"], step["status"]) for step in steps] == [*zip("abcd", ["passed", "not run"] * 2, strict=True)]
    assert [step["executed"] for step in steps] == [1, 0, 1, 0]


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

    run.main(["--out", str(tmp_path)], {"part": steps_of(run, "b", kind="bench")}, command, lambda: None)
    (step,) = summary(tmp_path)["steps"]
    assert step["status"] == status


@pytest.mark.parametrize(
    ("device", "failed", "code", "status"),
    [("mock", 0, 0, "passed"), ("cuda:9", 1, 1, "failed"), ("no device", 0, 1, "failed")],
)
def test_the_doctor_is_the_users_own_and_its_findings_are_counted(
    run: Any, tmp_path: Path, device: str, failed: int, code: int, status: str
) -> None:
    step = run.Step("doctor", "doctor", ("--launch", "--device", device), 120.0)
    assert run.main(["--out", str(tmp_path)], {"part": [step]}, run.real_command, lambda: None) == code
    (found,) = summary(tmp_path)["steps"]
    assert (found["status"], found["failed"]) == (status, failed)
    if device == "mock":
        assert found["executed"] == 6, "a copy and five cases"
    assert ("doctor.zip" in unpacked(tmp_path)) == (device != "no device")


def test_without_a_gpu_nothing_is_said_to_have_run(tmp_path: Path) -> None:
    command = [sys.executable, str(PATH), "--out", str(tmp_path), "--only", "conformance", "bench-forward"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env={"PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 1, done.stderr
    assert "nothing was run" in done.stdout
    found = summary(tmp_path)
    assert [step["status"] for step in found["steps"]] == ["not run"] * 2
    assert found["passed"] is False


def test_every_step_names_files_that_are_there_and_suites_that_are_known(run: Any) -> None:
    every = [step for steps in run.PARTS.values() for step in steps]
    named = {argument for step in every if step.kind == "tests" for argument in step.arguments}
    assert all((run.ROOT / name).exists() for name in named)
    files = {f"tests/gpu/{path.name}" for path in PATH.parent.glob("test_*.py")}
    assert files <= named, "a file of tests is in no step"
    from gpu_actors.bench import SUITES

    assert {step.arguments[0] for step in every if step.kind == "bench"} <= set(SUITES)
    for step in every:
        assert run.real_command(step, Path("/tmp"), 60.0)[0] == sys.executable


def test_tests_that_mostly_compile_are_spread_over_processes(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spread, alone = run.PARTS["kernels"][0], run.PARTS["service"][0]
    monkeypatch.setattr(run.os, "sched_getaffinity", lambda _: range(16))
    command = run.real_command(spread, Path("/tmp"), 60.0)
    assert command[command.index("-n") + 1] == "12"
    assert "-n" not in run.real_command(alone, Path("/tmp"), 60.0)
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda _: None)
    assert "-n" not in run.real_command(spread, Path("/tmp"), 60.0)


LOSING = """
import cupy, pytest

@pytest.mark.gpu
@pytest.mark.parametrize("number", range(4))
def test_a_kernel(number):
    if number == 1:
        cupy.lost = True
    assert not cupy.lost
"""
STUB = """
from types import SimpleNamespace

lost = False

def synchronize():
    if lost:
        raise RuntimeError("illegal instruction")

cuda = SimpleNamespace(runtime=SimpleNamespace(deviceSynchronize=synchronize))
"""


def test_a_worker_whose_context_is_lost_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text(STUB)
    (tmp_path / "test_losing.py").write_text(LOSING)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{PATH.parents[1]}:{PATH.parents[1] / 'lib'}"}
    options = ["-p", "conftest", "-o", "markers=gpu", "-n", "1", "-m", "gpu", "-rA", "test_losing.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    passed = sorted(line.removeprefix("PASSED ") for line in done.stdout.splitlines() if line.startswith("PASSED "))
    assert passed == [f"test_losing.py::test_a_kernel[{number}]" for number in (0, 2, 3)], done.stdout + done.stderr
    assert "assert not True" in done.stdout


def test_a_file_of_tests_that_no_step_names_is_run_all_the_same(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_KERNELS", tuple(step for step in run._KERNELS if step.name != "kernels"))
    (others,) = run._others()
    assert "tests/gpu/test_kernels.py" in others.arguments
