"""``gpu-actors warm``: what it compiles and reports, and how it is interrupted."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from inside.compiling import Compiler
from inside.kernels import merge, variants
from support.cli import Run
from support.service import interrupt

from gpu_actors import Cubin, DispatchKey, KernelResources, KernelSource
from gpu_actors.cli.warm import _label


@pytest.fixture
def few_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = variants.standard_variants

    def few(arch: str) -> list[DispatchKey]:
        return everything(arch)[:2]

    monkeypatch.setattr(variants, "standard_variants", few)
    monkeypatch.setattr(variants, "kv_variants", lambda arch: [])
    monkeypatch.setattr(merge, "merge_variants", lambda arch: [])
    gradients = variants.usual_backward_keys
    monkeypatch.setattr(variants, "usual_backward_keys", lambda arch: gradients(arch)[:1])


@pytest.mark.usefixtures("few_variants")
def test_warm_fills_the_cache_and_reports_each_variant(run: Run, tmp_path: Path) -> None:
    options = ("warm", "--arch", "sm_80", "--cache-dir", tmp_path, "--device", "mock")
    code, out, err = run(*options, "--report", "--json")
    rows = json.loads(out)
    assert code == 0
    assert len(rows) == 2 == len(list(tmp_path.glob("*.cubin")))
    for row in rows:
        assert (row["arch"], "arch=sm_80" in row["key"]) == ("sm_80", True)
        assert row["registers"] > 0
        assert row["compile_seconds"] > 0
        assert {"spill_bytes", "stack_bytes", "shared_bytes"} <= set(row)
        assert isinstance(row["notes"], list)
    assert "2 variants in the cache" in err
    _, table, _ = run(*options, "--report", "--quiet")
    assert all(row["label"] in table for row in rows)
    assert run(*options, "--quiet")[1:] == ("", "")
    *_, gradient = json.loads(run(*options, "--backward", "--json", "-q")[1])
    assert "direction=backward" in gradient["key"]
    assert len(list(tmp_path.glob("*.cubin"))) == 3


@pytest.fixture
def no_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compile takes no time and returns an empty kernel of the right name."""

    def compiled(self: Compiler, source: KernelSource, arch: str) -> Cubin:
        resources = {name: KernelResources(32, 0, 0, 0) for name in source.entry_points}
        return Cubin(b"\x7fELF", arch, source.entry_points, "", resources)

    monkeypatch.setattr(Compiler, "compile", compiled)


@pytest.mark.usefixtures("no_compiles")
def test_warm_reports_every_variant_of_an_arch_or_of_the_devices_own(run: Run, tmp_path: Path) -> None:
    """One of each set of architectures that have the same variants."""
    for arch in (None, "sm_80", "sm_86", "sm_100a", "sm_120a"):
        options = ("--cache-dir", tmp_path / str(arch), "--device", "mock", "--backward", "--json")
        code, out, err = run("warm", *(("--arch", arch) if arch else ()), *options)
        assert code == 0, f"{arch}: {err}"
        rows = json.loads(out)
        assert f"{len(rows)} variants in the cache" in err
        assert {row["arch"] for row in rows} == {arch or "sm_90a"}
        for row in rows:
            assert row["threads"] % 32 == 0 < row["threads"] <= 1024, f"{arch}: {row['label']}"
            assert row["blocks_per_sm"] > 0, f"{arch}: {row['label']}"
            assert "= " not in f"{row['label']} ", "a field without a value"


def test_an_arch_that_is_none_is_named(run: Run) -> None:
    for arch, begins, ends in (
        ("sm_90", "gpu-actors: arch", "(nearest supported: sm_90a)\n"),
        ("bogus", "gpu-actors: arch 'bogus': give an architecture such as", "\n"),
        ("", "gpu-actors: arch '': give an architecture such as", "\n"),
    ):
        code, out, err = run("warm", "--arch", arch, "--device", "mock")
        assert (code, out, err.startswith(begins), err.endswith(ends)) == (2, "", True, True), err


def test_warm_says_at_once_that_its_folder_is_none(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = run("warm", "--cache-dir", tmp_path / "file", "--device", "mock")
    assert (code, out) == (2, "")
    assert err == f"gpu-actors: cache_dir {tmp_path / 'file'} is not a folder, nor can one be made there\n"


def test_an_interrupted_warm_ends_after_the_compiles_in_progress(tmp_path: Path) -> None:
    code = """
import os, signal, threading
from concurrent.futures import ThreadPoolExecutor
from gpu_actors import CompileError
from gpu_actors.cli import main
from gpu_actors.compiling import compiler
# A test run in the background is started with SIGINT ignored, and hands that on.
signal.signal(signal.SIGINT, signal.default_int_handler)
dropped, shutdown = threading.Event(), ThreadPoolExecutor.shutdown
def compile(self, source, arch=None):
    os.write(1, b"begun\\n")  # whole, whatever the other thread writes
    dropped.wait()
    raise CompileError("not now")
def drop(self, *given, **options):
    shutdown(self, *given, **options)
    dropped.set()
compiler.Compiler.compile, ThreadPoolExecutor.shutdown = compile, drop
main()
"""
    given = [sys.executable, "-c", code, "warm", "--arch", "sm_80", "--cache-dir", str(tmp_path), "--device", "mock"]
    with subprocess.Popen(given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        interrupt(process.pid)
        out, err = process.communicate(timeout=200)
    assert (process.returncode, err) == (130, "")
    in_progress = min(8, os.cpu_count() or 1)
    assert 1 + out.count("begun") <= in_progress < len(variants.standard_variants("sm_80"))


def test_labels_tell_all_standard_variants_apart() -> None:
    keys = variants.standard_variants("sm_90a")
    others = [
        *variants.kv_variants("sm_90a"),
        *merge.merge_variants("sm_90a"),
        *variants.usual_backward_keys("sm_90a"),
    ]
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
