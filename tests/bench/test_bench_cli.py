"""``gpu-actors bench``: its suites, what they print without a GPU, and the exit code of the command."""

from __future__ import annotations

import json
import pkgutil
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.cli import Run

import gpu_actors.bench
from gpu_actors.errors import GpuActorsError


def test_every_suite_of_the_package_can_be_run(run: Run) -> None:
    names = run("bench", "--list")[1].split()
    assert {"bridge", "compile", "host", "imports"} <= set(names)
    assert names == list(gpu_actors.bench.SUITES)
    for name, function in gpu_actors.bench.SUITES.items():
        assert callable(pkgutil.resolve_name(f"gpu_actors.bench.{function}")), name


@pytest.mark.parametrize("suite", ["forward", "backward", "decode"])
def test_a_gpu_suite_says_in_a_sentence_that_there_is_no_gpu(
    run: Run, suite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_actors.bench.stage.cuda_usable", lambda index: "there is no NVIDIA driver")
    for device in ("auto", "cuda:1"):
        code, out, err = run("bench", suite, "--device", device)
        assert (code, out) == (1, "")
        assert err == (
            f"gpu-actors: the {suite} suite measures a GPU, and there is none to be used here: "
            f"there is no NVIDIA driver; in a clone, python -m benchmarks.model {suite} estimates without one\n"
        )
    code, _, err = run("bench", suite, "--device", "mock")
    assert code == 2
    assert "must be cuda or cuda:N" in err


def test_only_measurements_of_a_gpu_are_drawn(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_actors.bench.imports.run", lambda: {"seconds": 1.0})
    out = tmp_path / "imports.json"
    code, _, err = run("bench", "imports", "--out", str(out), "--plot", str(tmp_path / "imports.png"))
    assert code == 2
    assert "only measurements" in err
    assert json.loads(out.read_text())["seconds"] == 1.0


@pytest.mark.parametrize(("status", "code"), [("timed", 0), ("unsupported", 0), ("wrong", 1), ("failed", 1)])
def test_a_kernel_that_is_wrong_or_fails_is_the_commands_failure(
    run: Run, monkeypatch: pytest.MonkeyPatch, status: str, code: int
) -> None:
    row = {"subject": "gpu_actors kernel", "status": status}
    monkeypatch.setattr("gpu_actors.bench.stage.forward", lambda: {"kind": "measurement", "rows": [row]})
    assert run("bench", "forward", "--json")[0] == code


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "def run(device='auto'):\n    return {'device': device, 'latency': {'alone_us': 20.5, 'many': None}}\n"
    (tmp_path / "sample.py").write_text(code)
    monkeypatch.setattr(gpu_actors.bench, "__path__", [str(tmp_path)])
    monkeypatch.setattr("gpu_actors.cli.bench.SUITES", {"sample": "sample.run"})
    monkeypatch.delitem(sys.modules, "gpu_actors.bench.sample", raising=False)


@pytest.mark.usefixtures("suite")
def test_bench_runs_a_suite_and_prints_its_figures(run: Run) -> None:
    code, out, _ = run("bench", "sample", "--json", "--device", "mock")
    figures = json.loads(out)
    assert figures.pop("environment")["python"] == platform.python_version()
    assert (code, figures) == (0, {"device": "mock", "latency": {"alone_us": 20.5, "many": None}})
    _, table, _ = run("bench", "sample")
    assert "latency.alone_us" in table
    assert "20.5" in table


def test_the_file_has_what_was_measured_before_a_run_is_cut_off(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def cut_off(keep: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        keep({"rows": [1]})
        raise GpuActorsError("cut off")

    monkeypatch.setattr("gpu_actors.bench.stage.forward", cut_off)
    out = tmp_path / "forward.json"
    assert run("bench", "forward", "--out", str(out))[0] == 1
    assert json.loads(out.read_text())["rows"] == [1]


def test_the_file_may_be_a_pipe() -> None:
    suite = "import gpu_actors.bench.imports as suite; suite.run = lambda: {'seconds': 1.0}"
    code = f"{suite}; from gpu_actors.cli import main; main()"
    command = [sys.executable, "-c", code, "bench", "imports", "--out", "/dev/stdout"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert '"seconds": 1.0' in done.stdout


def test_figures_are_written_with_a_line_a_row() -> None:
    figures = {"cpus": 2, "load": [0.1, 0.2], "rows": [{"a": {"b": None}}, {"a": 1}], "by": {"x": {"é": [1, 2]}}}
    text = gpu_actors.bench.in_rows(figures)
    assert json.loads(text) == figures
    assert text.splitlines()[3:6] == ['  "rows": [', '    {"a": {"b": null}},', '    {"a": 1}']
    with pytest.raises(ValueError, match="JSON"):
        gpu_actors.bench.in_rows({"a": float("nan")})


@pytest.mark.usefixtures("suite")
def test_bench_names_its_suites(run: Run) -> None:
    assert run("bench", "--list")[:2] == (0, "sample\n")
    code, _, err = run("bench", "other")
    assert (code, err) == (2, "gpu-actors: suite other must be one of sample\n")
    for arguments in (("bench",), ("bench", "")):
        assert run(*arguments) == (2, "", "gpu-actors: name a suite: sample\n")
