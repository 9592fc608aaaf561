"""``gpu-actors warm``: what it compiles and reports, and how it is interrupted."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from inside.compiling import FIRST_CAPABILITY, Compiler, supported_archs
from inside.kernels import capability, merge, variants
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


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.usefixtures("few_variants")
def test_warm_fills_the_cache_and_reports_each_variant(run: Run, tmp_path: Path, arch: str) -> None:
    options = ("warm", "--arch", arch, "--cache-dir", tmp_path, "--device", "mock")
    code, out, err = run(*options, "--report", "--json")
    rows = json.loads(out)
    assert code == 0
    assert len(rows) == 2 == len(list(tmp_path.glob("*.cubin")))
    for row in rows:
        assert row["arch"] == arch
        assert f"arch={arch}" in row["key"]
        assert row["registers"] > 0
        assert row["compile_seconds"] > 0
        assert {"spill_bytes", "stack_bytes", "shared_bytes"} <= set(row)
        assert isinstance(row["notes"], list)
    assert "2 variants in the cache" in err
    _, table, _ = run(*options, "--report", "--quiet")
    assert all(row["label"] in table for row in rows)
    assert run(*options, "--quiet")[1:] == ("", "")


@pytest.fixture
def no_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compile takes no time and gives an empty kernel of the right name."""

    def compiled(self: Compiler, source: KernelSource, arch: str) -> Cubin:
        resources = {name: KernelResources(32, 0, 0, 0) for name in source.entry_points}
        return Cubin(b"\x7fELF", arch, source.entry_points, "", resources)

    monkeypatch.setattr(Compiler, "compile", compiled)


@pytest.mark.usefixtures("no_compiles")
def test_warm_reports_every_variant_of_every_arch(run: Run, tmp_path: Path) -> None:
    archs = [arch for arch in supported_archs() if capability(arch) >= FIRST_CAPABILITY]
    assert {"sm_80", "sm_90a", "sm_100a"} <= set(archs)
    for arch in archs:
        options = ("--arch", arch, "--cache-dir", tmp_path / arch, "--device", "mock", "--backward", "--json")
        code, out, err = run("warm", *options)
        assert code == 0, f"{arch}: {err}"
        rows = json.loads(out)
        assert f"{len(rows)} variants in the cache" in err
        for row in rows:
            assert row["threads"] % 32 == 0 < row["threads"] <= 1024, f"{arch}: {row['label']}"
            assert row["blocks_per_sm"] > 0, f"{arch}: {row['label']}"


@pytest.mark.usefixtures("no_compiles")
def test_warm_without_an_arch_reports_every_variant_of_the_device(run: Run, tmp_path: Path) -> None:
    code, out, err = run("warm", "--cache-dir", tmp_path, "--device", "mock", "--json")
    assert code == 0, err
    assert {row["arch"] for row in json.loads(out)} == {"sm_90a"}


@pytest.mark.usefixtures("few_variants")
def test_warm_compiles_the_kernels_of_gradients_where_it_is_asked_to(run: Run, tmp_path: Path) -> None:
    options = ("warm", "--arch", "sm_80", "--cache-dir", tmp_path, "--device", "mock", "--backward", "--json", "-q")
    *_, gradient = json.loads(run(*options)[1])
    assert "direction=backward" in gradient["key"]
    assert len(list(tmp_path.glob("*.cubin"))) == 3


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


@pytest.mark.usefixtures("no_compiles")
def test_labels_name_no_field_without_a_value(run: Run, tmp_path: Path) -> None:
    options = ("warm", "--arch", "sm_90a", "--cache-dir", tmp_path, "--device", "mock", "--backward", "--json", "-q")
    labels = [row["label"] for row in json.loads(run(*options)[1])]
    assert labels
    assert not [label for label in labels if "= " in f"{label} "]
