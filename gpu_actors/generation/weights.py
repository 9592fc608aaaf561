"""The weights of a model: drawn from a seed, or read from a folder in the layout of a Hugging Face repository."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpu_actors.errors import InvalidRequest
from gpu_actors.extras import missing
from gpu_actors.generation.config import LlamaConfig

__all__ = ["LayerWeights", "Weights", "load_weights", "random_weights", "tensor_names"]

Matrix: TypeAlias = NDArray[np.float32]
_DTYPES = ("F64", "F32", "F16", "BF16")


class LayerWeights(NamedTuple):
    """One decoder layer. Matrices are (columns in, columns out): rows of activations are multiplied from the left."""

    attention_norm: Matrix
    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    mlp_norm: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix


class Weights(NamedTuple):
    """embedding: (vocab, hidden). head: (hidden, vocab)."""

    embedding: Matrix
    layers: tuple[LayerWeights, ...]
    norm: Matrix
    head: Matrix


_LAYER = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def tensor_names(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a model and their shapes, by Hugging Face's names: matrices are (out, in) there."""
    hidden, inner = config.hidden, config.intermediate
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (hidden,),
        "q": (q, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, q),
        "mlp_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    names: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab, hidden)}
    for layer in range(config.layers):
        for field, name in _LAYER.items():
            names[f"model.layers.{layer}.{name}.weight"] = shapes[field]
    names["model.norm.weight"] = (hidden,)
    if not config.tied:
        names["lm_head.weight"] = (config.vocab, hidden)
    return names


def random_weights(config: LlamaConfig, seed: int = 0) -> Weights:
    """Weights that keep activations near 1, the same for the same seed."""
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Matrix:
        if len(shape) == 1:
            return np.asarray(1.0 + 0.1 * rng.standard_normal(shape), np.float32)
        return np.asarray(rng.standard_normal(shape) * shape[1] ** -0.5, np.float32)

    return _assemble(config, draw)


def load_weights(folder: Path, config: LlamaConfig) -> Weights:
    """Read model.safetensors, or the files that model.safetensors.index.json lists.

    Raises `InvalidRequest` where one is missing or broken, or a tensor is not of the shape that config.json calls for.
    """
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise InvalidRequest("model", str(folder), missing(error, "serve")) from error
    index = folder / "model.safetensors.index.json"
    paths = [folder / "model.safetensors"]
    if index.is_file():
        listed = _read(index, lambda: json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        paths = [folder / name for name in sorted(set(listed))]
    files: dict[str, Any] = {}
    for path in paths:
        file = _read(path, lambda path=path: safe_open(path, framework="np"))  # type: ignore[misc]
        files |= dict.fromkeys(file.keys(), file)

    def take(name: str, shape: tuple[int, ...]) -> Matrix:
        file = files.get(name)
        if file is None:
            raise InvalidRequest(name, "missing", f"must have shape {shape} in {folder}")
        tensor = file.get_slice(name)
        if tuple(tensor.get_shape()) != shape or tensor.get_dtype() not in _DTYPES:
            given = f"{tensor.get_dtype()} of shape {tuple(tensor.get_shape())}"
            raise InvalidRequest(name, given, f"must be {', '.join(_DTYPES)} of shape {shape} in {folder}")
        return np.asarray(file.get_tensor(name), np.float32)

    return _assemble(config, take)


def _assemble(config: LlamaConfig, tensor: Callable[[str, tuple[int, ...]], Matrix]) -> Weights:
    got = {name: tensor(name, shape) for name, shape in tensor_names(config).items()}

    def one(name: str) -> Matrix:
        found = got[name]
        return np.ascontiguousarray(found.T) if found.ndim == 2 else found

    layers = (
        LayerWeights(**{field: one(f"model.layers.{layer}.{name}.weight") for field, name in _LAYER.items()})
        for layer in range(config.layers)
    )
    embedding = got["model.embed_tokens.weight"]
    head = np.ascontiguousarray(embedding.T) if config.tied else one("lm_head.weight")
    return Weights(embedding, tuple(layers), one("model.norm.weight"), head)


def _read(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # safetensors has one of its own, which derives from nothing else
        raise InvalidRequest("model", str(path), f"is not a readable file of this kind: {error!r}") from error
