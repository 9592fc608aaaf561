"""The weights of a model: random from a seed, or read from a folder in the layout of a Hugging Face repository."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpu_actors.errors import InvalidRequest
from gpu_actors.generation.config import LlamaConfig
from gpu_actors.model_files import Tensors, read_json

__all__ = ["LayerWeights", "Weights", "assemble", "cores", "dtype_of", "load_weights", "random_weights", "tensor_names"]

Matrix: TypeAlias = NDArray[np.float32]


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
    """The weights of a model.

    embedding: (vocab, hidden).
    head: (hidden, vocab). If the model ties head and embedding, they share memory.
    stored: the format of the matrices in the file, such as "bfloat16" or "Q4_1, Q8_0", or "random".
    dtype: of attention's operands, to lose no precision of the matrices (see `dtype_of`).
    """

    embedding: Matrix
    layers: tuple[LayerWeights, ...]
    norm: Matrix
    head: Matrix
    stored: str = "random"
    dtype: str = "float32"


def _layer_tensors(config: LlamaConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor of a layer, by the field of `LayerWeights`."""
    hidden, inner = config.hidden, config.intermediate
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "attention_norm": ("input_layernorm", (hidden,)),
        "q": ("self_attn.q_proj", (q, hidden)),
        "k": ("self_attn.k_proj", (kv, hidden)),
        "v": ("self_attn.v_proj", (kv, hidden)),
        "o": ("self_attn.o_proj", (hidden, q)),
        "mlp_norm": ("post_attention_layernorm", (hidden,)),
        "gate": ("mlp.gate_proj", (inner, hidden)),
        "up": ("mlp.up_proj", (inner, hidden)),
        "down": ("mlp.down_proj", (hidden, inner)),
    }


def tensor_names(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a model and their shapes, by Hugging Face's names: matrices are (out, in) there."""
    names: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab, config.hidden)}
    for layer in range(config.layers):
        for name, shape in _layer_tensors(config).values():
            names[f"model.layers.{layer}.{name}.weight"] = shape
    names["model.norm.weight"] = (config.hidden,)
    if not config.tied:
        names["lm_head.weight"] = (config.vocab, config.hidden)
    return names


def random_weights(config: LlamaConfig, seed: int = 0) -> Weights:
    """Random weights that keep activations near 1. The same seed makes the same weights."""
    rng = np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> Matrix:
        if len(shape) == 1:
            return np.asarray(1.0 + 0.1 * rng.standard_normal(shape), np.float32)
        return np.asarray(rng.standard_normal(shape) * shape[1] ** -0.5, np.float32)

    return assemble(config, draw)


def dtype_of(stored: Iterable[str]) -> str:
    """The dtype of attention's operands for matrices in these formats: their common half precision, or float32.

    The model itself computes in float32.
    """
    forms = set(stored)
    return forms.pop() if forms in ({"float16"}, {"bfloat16"}) else "float32"


def cores() -> int:
    return len(os.sched_getaffinity(0))


def load_weights(folder: Path, config: LlamaConfig) -> Weights:
    """Read model.safetensors, or the files that model.safetensors.index.json lists.

    Raises `InvalidRequest` if one is missing or broken, or if a tensor's shape does not follow from config.json.
    """
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        listed = read_json(index, dict).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise InvalidRequest("model", str(index), "must hold weight_map, the file of each tensor")
        names = sorted(set(listed.values()))
    tensors = Tensors([folder / name for name in names], "serve")
    weights = assemble(config, tensors.take, cores())
    return weights._replace(stored=", ".join(sorted(tensors.stored)), dtype=dtype_of(tensors.stored))


def assemble(config: LlamaConfig, tensor: Callable[[str, tuple[int, ...]], Matrix], threads: int = 1) -> Weights:
    """The weights from a function that returns each tensor of `tensor_names`. ``threads`` threads call it."""
    embedding_name = "model.embed_tokens.weight"

    def one(named: tuple[str, tuple[int, ...]]) -> Matrix:
        matrix = tensor(*named)
        if len(matrix.shape) == 1 or (named[0] == embedding_name and not config.tied):
            return matrix
        # BLAS multiplies a few rows in two thirds of the time if the columns of a product are contiguous.
        return np.ascontiguousarray(matrix.T)

    names = tensor_names(config)
    with ThreadPoolExecutor(threads) as pool:
        tensors = dict(zip(names, pool.map(one, names.items()), strict=True))
    fields = {field: name for field, (name, _) in _layer_tensors(config).items()}
    layers = (
        LayerWeights(**{field: tensors[f"model.layers.{layer}.{name}.weight"] for field, name in fields.items()})
        for layer in range(config.layers)
    )
    embedding = tensors[embedding_name]
    embedding, head = (embedding.T, embedding) if config.tied else (embedding, tensors["lm_head.weight"])
    return Weights(embedding, tuple(layers), tensors["model.norm.weight"], head)
