"""The weights of a model: drawn from a seed, or read from a folder in the layout of a Hugging Face repository."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from gpu_actors import InvalidRequest
from llama.config import LlamaConfig

__all__ = ["LayerWeights", "Weights", "load_weights", "random_weights", "tensor_names"]

Matrix: TypeAlias = NDArray[np.float32]
_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


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
    index = folder / "model.safetensors.index.json"
    files = [folder / "model.safetensors"]
    if index.is_file():
        listed = _read(index, lambda: json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = [folder / name for name in sorted(set(listed))]
    found: dict[str, Any] = {}
    for file in files:
        found |= _read(file, lambda file=file: _tensors(file))  # type: ignore[misc]

    def take(name: str, shape: tuple[int, ...]) -> Matrix:
        tensor = found.get(name)
        if tensor is None or tensor.shape != shape:
            given = "missing" if tensor is None else f"shape {tensor.shape}"
            raise InvalidRequest(name, given, f"must have shape {shape} in {folder}")
        return np.asarray(tensor, np.float32)

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


def _tensors(path: Path) -> dict[str, Any]:
    """Views of a safetensors file: 8 bytes of length, a JSON header of that length, then the tensors' bytes.

    Read here because the library's NumPy side knows no bfloat16.
    """
    mapped = np.memmap(path, np.uint8, mode="r")
    length = int(mapped[:8].view("<u8")[0])
    if length > len(mapped) - 8:
        raise ValueError(f"its header of {length} bytes is longer than the file")
    header = json.loads(bytes(mapped[8 : 8 + length]))
    header.pop("__metadata__", None)
    data = mapped[8 + length :]
    found: dict[str, Any] = {}
    for name, entry in header.items():
        if entry["dtype"] in _DTYPES:
            begin, end = entry["data_offsets"]
            found[name] = data[begin:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return found


def _read(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest("model", str(path), f"is not a readable file of this kind: {error!r}") from error
