"""The command gpu-actors as a whole and its doctor: what they print, where, and their exit codes."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from inside.compiling import toolchain
from inside.package import cuda_hint, install_hint
from support.cli import Run, command_line

import gpu_actors.bench
from gpu_actors.cli import probes
from gpu_actors.cli.output import error_sentence, silence_if_closed, write_json, write_json_list, write_table
from gpu_actors.errors import CompileError, InvalidRequest, Unsupported


def test_help_and_version_import_nothing_heavy() -> None:
    code = """
import sys
from gpu_actors.cli import main
for option in ("--help", "--version"):
    sys.argv = ["gpu-actors", option]
    try:
        main()
    except SystemExit as exit:
        assert not exit.code
heavy = {"cupy", "torch", "tokenizers", "safetensors", "gpu_actors.embedding", "rich.table"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    for part in ("doctor", "embed", "warm", "bench", f"gpu-actors {gpu_actors.__version__}"):
        assert part in done.stdout


@pytest.mark.parametrize("command", ["doctor", "embed", "warm", "bench"])
def test_every_subcommand_has_help_device_and_json(command: str, run: Run) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "--device" in out
    assert "--json" in out


@pytest.mark.parametrize("command", [("doctor",), ("warm",), ("embed", __file__)])
def test_an_unknown_device_is_one_sentence_and_exit_code_2(command: tuple[str, ...], run: Run) -> None:
    code, out, err = run(*command, "--device", "gpu")
    assert (code, out) == (2, "")
    assert err == 'gpu-actors: device gpu must be "auto", "cuda", "cuda:N", "emulated" or "mock"\n'


def test_errors_read_as_sentences() -> None:
    assert error_sentence(InvalidRequest("file", "a.txt", "is empty")) == "file a.txt is empty"
    assert error_sentence(InvalidRequest("model", None, "the weights are missing")) == "the weights are missing"
    unsupported = Unsupported("arch", "sm_90", "kernels differ", nearest="sm_90a")
    assert error_sentence(unsupported) == "arch 'sm_90': kernels differ (nearest supported: sm_90a)"
    assert error_sentence(InvalidRequest("file", "", "does not exist")) == "file '' does not exist"
    assert error_sentence(InvalidRequest("file", "a\nb", "does not exist")) == "file 'a\\nb' does not exist"
    assert error_sentence(InvalidRequest("top", 10**5000, "is large")) == "top an int of 16610 bits is large"
    assert error_sentence(OSError(28, "No space left on device")) == "No space left on device"
    assert error_sentence(OSError(13, "Permission denied", "a.txt")) == "a.txt: Permission denied"
    assert error_sentence(CompileError("no compiler", log="long")) == "no compiler"
    assert error_sentence(KeyError()) == "KeyError"


def test_json_that_would_not_be_json_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json({"value": math.nan})
    write_json_list([])
    write_json_list([1, {"a": "é"}])
    assert capsys.readouterr().out == '[]\n[\n1,\n{"a": "é"}\n]\n'


def test_a_table_into_a_closed_pipe_is_an_error_after_which_nothing_more_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(BrokenPipeError):
            write_table(("name",), [("value",)])
        silence_if_closed(closed)
        monkeypatch.undo()


def test_nothing_can_be_said_where_standard_error_is_full() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command_line("bench", "nothing"), stdout=full, stderr=full, timeout=200, check=False)
    assert done.returncode == 2


# doctor


def doctored(run: Run) -> dict[str, dict[str, str]]:
    """The checks of a report by their names."""
    return {check["name"]: check for check in json.loads(run("doctor", "--json", "--device", "mock")[1])["checks"]}


def test_doctor_reports_everything_and_tries_the_device(run: Run) -> None:
    code, out, _ = run("doctor", "--json", "--device", "mock")
    report = json.loads(out)
    assert (code, report["usable"]) == (0, True)
    names = [check["name"] for check in report["checks"]]
    assert names == [*probes.PROBES, "trial on mock"]
    assert "mock sm_90a answered in" in report["checks"][-1]["detail"]
    assert [verdict["device"] for verdict in report["devices"]] == ["auto", "cuda", "emulated", "mock"]
    states = {check["name"]: check["state"] for check in report["checks"]}
    assert states["python"] == states["libraries"] == states["kernels"] == "ok"


def test_doctor_without_cuda_says_why_and_exits_with_1(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for check in ("attention_obstacle", "cuda_usable"):
        monkeypatch.setattr(f"gpu_actors.devices.cuda.{check}", lambda *_: "there is no driver here")
    code, out, _ = run("doctor", "--json", "--device", "cuda")
    report = json.loads(out)
    assert (code, report["usable"]) == (1, False)
    verdicts = {verdict["device"]: verdict for verdict in report["devices"]}
    assert (verdicts["cuda"]["usable"], verdicts["cuda"]["why"]) == (False, "there is no driver here")
    assert verdicts["auto"]["runs"] == verdicts["mock"]["runs"]
    assert "there is no driver here" in report["checks"][-1]["detail"]


def test_a_probe_that_raises_is_a_line_of_the_report(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probes.PROBES, "kernels", lambda: [].pop())
    found = doctored(run)["kernels"]
    assert (found["state"], found["detail"]) == ("problem", "IndexError: pop from empty list")


def test_doctor_says_that_an_mps_daemon_voids_isolation(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    found = doctored(run)["mps"]
    assert (found["state"], found["hint"], "share a GPU's memory" in found["detail"]) == ("ok", "", True)
    (tmp_path / "control").touch()
    found = doctored(run)["mps"]
    assert (found["state"], "ends every process on its GPU" in found["detail"]) == ("missing", True)
    assert 'isolation="process"' in found["hint"]


def test_doctor_refuses_to_praise_a_cache_that_others_can_write(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GPU_ACTORS_CACHE_DIR", str(tmp_path))
    for mode, state, said in ((0o777, "problem", "others can write to it"), (0o700, "ok", "0 entries")):
        tmp_path.chmod(mode)
        cache = doctored(run)["cubin cache"]
        assert (cache["state"], said in cache["detail"]) == (state, True)


def test_doctor_names_the_compiler_that_is_loaded_in_place_of_the_installed_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "installed_toolchain", lambda: toolchain.Toolchain("12.1.0", ()))
    monkeypatch.setattr(toolchain, "_loaded", toolchain.Toolchain("13.7", ()))
    nvrtc = doctored(run)["nvrtc"]
    assert nvrtc["state"] == "ok"
    assert nvrtc["detail"].startswith("13.7, compiles for sm_")
    assert "not 12.1.0, which is installed, because another toolkit comes first" in nvrtc["detail"]


def test_doctor_says_once_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "version_of", lambda name: "1.0")
    assert doctored(run)["cupy"]["detail"] == "cupy-cuda12x and cupy-cuda13x are both installed"
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr(probes, "version_of", lambda name: None)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "cupy" else found(name, *rest))
    _, out, _ = run("doctor", "--device", "mock")
    assert out.count("without CuPy") == 2
    for hint in (cuda_hint(), install_hint("demo"), install_hint("metrics")):
        assert out.count(hint) == 1, hint
    assert out.count("CuPy is not installed") == 2
    assert "prometheus-client not installed: no metrics" in out
    assert f"-> {install_hint('metrics')}" in out
