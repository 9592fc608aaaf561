"""``gpu-actors bench``: which suites there are, what they say without a GPU, and how the command ends."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_actors.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """(exit code, standard output, standard error) of the command."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["gpu-actors", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        code = left.value.code
        assert isinstance(code, int)
        return code, *capsys.readouterr()

    return call


def test_every_suite_of_the_package_can_be_run(run: Run) -> None:
    for name in run("bench", "--list")[1].split():
        assert callable(importlib.import_module(f"gpu_actors.bench.{name}").run), name


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
            f"there is no NVIDIA driver; gpu-actors bench {suite} --model estimates without one\n"
        )
    code, _, err = run("bench", suite, "--device", "mock")
    assert code == 2
    assert "must be cuda or cuda:N" in err


def test_a_model_is_labelled_as_one_in_json_and_in_the_table(run: Run, tmp_path: Path) -> None:
    found = run("bench", "backward", "--model", "--quick", "--json", "--out", str(tmp_path / "model.json"))
    figures = json.loads(found[1])
    assert (found[0], figures["kind"]) == (0, "model")
    assert json.loads((tmp_path / "model.json").read_text()) == figures
    assert "MODEL of backward" in run("bench", "backward", "--model", "--quick")[1]
    assert run("bench", "bridge", "--model")[0] == 2
    code, _, err = run("bench", "backward", "--model", "--plot", str(tmp_path / "model.png"))
    assert code == 2
    assert "only measurements" in err


@pytest.mark.parametrize(("status", "code"), [("timed", 0), ("unsupported", 0), ("wrong", 1), ("failed", 1)])
def test_a_kernel_that_is_wrong_or_fails_is_the_commands_failure(
    run: Run, monkeypatch: pytest.MonkeyPatch, status: str, code: int
) -> None:
    row = {"subject": "gpu_actors kernel", "status": status}
    monkeypatch.setattr("gpu_actors.bench.forward.run", lambda: {"kind": "measurement", "rows": [row]})
    assert run("bench", "forward", "--json")[0] == code
