"""`gpu-actors doctor --launch`: its findings for a healthy device, and for each fault."""

from __future__ import annotations

import json
import platform
import shutil
import socket
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inside.bench import KERNEL, Ceilings, Row, first_cases, quantiles
from inside.cli import Finding, FirstHour, examine, judge_cases, write_bundle, write_page
from support.cli import Run

import gpu_actors as ga
from gpu_actors.testing import FaultPlan, replay

pytestmark = [pytest.mark.timeout(180)]
CASES = ["forward", "forward", "decode", "decode", "backward"]


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the kernels of a healthy run."""
    folder = tmp_path_factory.mktemp("built")
    hour = emulated(folder)
    assert hour.works, hour.findings
    return folder


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "cache"))


def emulated(folder: Path, **options: Any) -> FirstHour:
    return examine("emulated", ga.ContextOptions(arch="sm_80", cache_dir=folder, **options))


def mocked(plan: FaultPlan | None = None, **options: Any) -> FirstHour:
    return examine("mock", ga.ContextOptions(fault_plan=plan, **options))


def of(hour: FirstHour, verdict: str) -> list[Finding]:
    return [finding for finding in hour.findings if finding.verdict == verdict]


def test_healthy_kernels_are_proved_and_timed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hour = emulated(folder)
    assert {finding.verdict for finding in hour.findings} == {"works"}
    names = [finding.name.split()[0] for finding in hour.findings]
    assert {"append", "forward_mma", "backward_mma", "decode_mma"} <= set(names)
    assert names[-6:] == ["copy", *CASES]
    assert all("(median of " in finding.found for finding in hour.findings[-6:])
    write_page(hour)
    shown = capsys.readouterr()
    assert "works" in shown.out
    assert "->" not in shown.out, "nothing is to be done"
    assert "say nothing of a GPU" in shown.err


def test_a_wrong_kernel_is_named_with_its_problem_and_its_evidence(folder: Path, tmp_path: Path) -> None:
    hour = emulated(folder, fault_plan=FaultPlan().wrong("forward_mma"))
    assert not hour.works
    wrong = of(hour, "wrong")
    assert {finding.name for finding in wrong} == {"forward_mma"}
    assert "quarantined: out is wrong in" in wrong[0].found
    assert "AttentionProblem(" in wrong[0].found
    assert "--bundle FILE" in wrong[0].advice
    assert [finding.name.split()[0] for finding in of(hour, "works")][-5:] == CASES, "the next kernel answers"
    write_bundle(hour, tmp_path / "report.zip")
    with zipfile.ZipFile(tmp_path / "report.zip") as bundle:
        report, text = json.loads(bundle.read("report.json")), bundle.read("report.json").decode()
        bundle.extractall(tmp_path / "unpacked")
    assert not report["works"]
    assert report["environment"]["gpu_actors"] == ga.__version__
    assert str(tmp_path) not in text
    assert str(Path.home()) not in text
    evidence = [entry["evidence"] for entry in report["kernels"] if entry["evidence"]]
    assert evidence
    for name in evidence:
        assert replay(tmp_path / "unpacked" / name).kernel == "forward_mma"


def test_a_hanging_kernel_is_told_after_its_limit(folder: Path) -> None:
    hour = emulated(folder, fault_plan=FaultPlan().hang(kernel="decode_mma"), hang_timeout=5.0)
    assert not hour.works
    assert {finding.name for finding in of(hour, "wrong")} == {"decode_mma"}
    assert all("has not ended within 5 s" in finding.found and finding.advice for finding in of(hour, "wrong"))


@pytest.mark.parametrize("launch", [1, 9])
def test_a_lost_device_ends_the_run_and_says_what_to_do(launch: int) -> None:
    hour = mocked(FaultPlan().lose_context(launch=launch), restart=ga.RestartPolicy(max_restarts=0))
    assert not hour.works
    (lost,) = of(hour, "failed")
    assert "ContextLost" in lost.found
    assert "Xid" in lost.advice
    assert hour.findings[-1] == Finding("the rest", "not run", "the device was lost before it")


@pytest.mark.parametrize("launch", [1, 9])
def test_too_little_memory_is_told_and_the_rest_goes_on(launch: int) -> None:
    hour = mocked(FaultPlan().fail(launch=launch, error=ga.OutOfDeviceMemory))
    assert not hour.works
    (failed,) = of(hour, "failed")
    assert "OutOfDeviceMemory" in failed.found
    assert "nvidia-smi" in failed.advice
    assert of(hour, "works")[-1].name.startswith("backward")


PROMPT, _, DECODE, *_ = first_cases()
HALF_OF_COPY = DECODE.bytes / 1e9  # milliseconds at 1000 GB/s, which is half of the copy's 2000


@pytest.mark.parametrize(
    ("case", "ours", "torch", "on_gpu", "verdict", "said"),
    [
        (PROMPT, 1.4, 1.0, True, "works", "torch FLASH_ATTENTION 1.0000 ms (median of 3)"),
        (PROMPT, 1.6, 1.0, True, "slow", "1.6000 ms (median of 3)"),
        (PROMPT, 9.0, None, True, "works", "no torch here"),
        (PROMPT, 9.0, 1.0, False, "works", "9.0000 ms"),
        (DECODE, 0.9 * HALF_OF_COPY, None, True, "works", "56% of the copy's bandwidth"),
        (DECODE, 1.1 * HALF_OF_COPY, None, True, "slow", "45% of the copy's bandwidth"),
    ],
)
def test_slow_is_what_a_time_of_the_same_run_shows(
    case: Any, ours: float, torch: float | None, on_gpu: bool, verdict: str, said: str
) -> None:
    subjects = {KERNEL: ours, "torch EFFICIENT_ATTENTION": torch and 5 * torch, "torch FLASH_ATTENTION": torch}
    rows = [
        Row(case=case, subject=subject, status="timed", times=quantiles([time] * 3))
        for subject, time in subjects.items()
        if time
    ]
    (finding,) = judge_cases(rows, Ceilings(copy=2000.0), on_gpu)
    assert (finding.verdict, bool(finding.advice)) == (verdict, verdict == "slow")
    assert said in finding.found


def test_a_device_that_does_not_open_is_a_finding(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr("gpu_actors.cli.first_hour.attention_obstacle", lambda *_: "there is no driver here")
    code, out, _ = run("doctor", "--launch", "--json", "--device", "cuda")
    record = json.loads(out)
    assert (code, record["works"]) == (1, False)
    assert record["findings"][-1]["found"] == "GpuActorsError: there is no driver here"
    assert "gpu-actors doctor" in record["findings"][-1]["advice"]


def contents(bundle: Path) -> dict[str, bytes]:
    """The contents of a bundle by name, with its arrays unpacked."""
    found = {}
    with zipfile.ZipFile(bundle) as files:
        for name in files.namelist():
            found[name] = files.read(name)
            if name.endswith(".npz"):
                with np.load(files.open(name)) as arrays:
                    found |= {f"{name}/{part}": arrays[part].tobytes() for part in arrays.files}
    return found


def test_a_bundle_has_nothing_of_the_users(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has neither requests that used the same cache, nor the environment, nor names in paths."""
    name, secret = 'Jürgen "J" Müller', "hunter2-from-the-environment"
    home, work, elsewhere = tmp_path / name, tmp_path / "work of a firm", tmp_path / "data" / "jmueller" / "cubins"
    for path in (home, work):
        path.mkdir()
    shutil.copytree(folder, elsewhere)
    for variable in ("HF_TOKEN", "CUDA_MODULE_LOADING", "LD_LIBRARY_PATH", "PYTHONSTARTUP"):
        monkeypatch.setenv(variable, secret)
    monkeypatch.setenv("HOME", str(home))
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(variable, "jmueller")
    monkeypatch.chdir(work)
    for module, node in ((platform, "node"), (socket, "gethostname")):
        monkeypatch.setattr(module, node, lambda: "host-of-a-firm")
    plan = FaultPlan().wrong("forward_mma")
    rows = np.random.default_rng(6721).standard_normal((1, 40, 2, 64)).astype(np.float16)
    options: dict[str, Any] = {"arch": "sm_80", "cache_dir": elsewhere, "fault_plan": plan}
    with ga.open_context("emulated", ga.ContextOptions(qualify="all", **options)) as ctx:
        answer = ctx.flash_attn.forward(rows, rows, rows, timeout=120.0).result().out
    bundle = tmp_path / "report.zip"
    hour = examine("emulated", ga.ContextOptions(**options))
    assert of(hour, "wrong")
    hour.findings.append(Finding("context", "failed", f"cannot read {elsewhere}, {home / 'x'} and {work / 'y'}"))
    write_bundle(hour, bundle)
    found = contents(bundle)
    assert any(part.endswith("/in.q") for part in found), "arrays are looked into"
    private = [secret, name, name.encode("unicode_escape").decode(), "jmueller", work.name, "host-of-a-firm"]
    for part, data in found.items():
        for text in private:
            assert text.encode() not in data, (part, text)
        for array in (rows, answer):
            assert array[0, 0].tobytes() not in data, part


def test_the_command_prints_the_object_and_writes_the_bundle(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("doctor", "--launch", "--json", "--device", "mock", "--bundle", tmp_path / "report.zip")
    record = json.loads(out)
    assert (code, record["works"], record["gpu"]) == (0, True, {})
    assert [row["case"]["kind"] for row in record["timings"]["rows"] if row["subject"].endswith("kernel")] == CASES
    with zipfile.ZipFile(tmp_path / "report.zip") as bundle:
        assert bundle.namelist() == ["report.json"]
        assert json.loads(bundle.read("report.json"))["findings"] == record["findings"]


def test_a_bundle_needs_launch(run: Run, tmp_path: Path) -> None:
    code, _, err = run("doctor", "--bundle", tmp_path / "report.zip")
    assert code == 2
    assert "needs --launch" in err
