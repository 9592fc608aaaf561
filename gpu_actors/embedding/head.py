"""The modules after the encoder's layers, from sentence-transformers' modules.json: pooling, Dense, Normalize."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpu_actors.embedding.layers import Floats, Linear, gelu_inplace
from gpu_actors.embedding.tokens import TokenBatch
from gpu_actors.embedding.weights import load_prompt, load_tensors, sentence_config
from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.model_files import read_json

__all__ = ["Head", "load_head"]

Step = Callable[[Floats], Floats]

_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The pooling modes by their flags in older files, in the order in which several are concatenated."""


@dataclass(frozen=True, slots=True)
class Head:
    """Makes a vector for each text from the last layer's rows.

    modes: poolings, any of "cls", "max" and "mean"; their results are concatenated.
    steps: functions applied to the pooled rows, in order.
    columns: the columns of the vectors.
    """

    modes: tuple[str, ...]
    steps: tuple[Step, ...]
    columns: int

    def __call__(self, x: Floats, batch: TokenBatch) -> Floats:
        """Return the vectors (texts, columns) float32, from x (T, hidden)."""
        y = np.concatenate([_POOLING[mode](x, batch) for mode in self.modes], axis=1)
        for step in self.steps:
            y = step(y)
        return y


def load_head(folder: Path, hidden: int) -> Head:
    """Read modules.json and the folders that it names. Without this file, texts are pooled by "mean" and normalised.

    Raises `InvalidRequest` for a broken file, `Unsupported` for a module that is not computed here.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return Head(("mean",), (_normalize,), hidden)
    modules = [_module(path, one) for one in read_json(path, list)]
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise Unsupported("modules.json type", ", ".join(kinds), "must begin with Transformer, Pooling", "Pooling")
    if modules[0][1]:
        raise Unsupported("modules.json path", modules[0][1], "must be empty for the Transformer", "")
    _expect(folder / "sentence_bert_config.json", "transformer_task", "feature-extraction")
    modes = _modes(folder, modules[1][1])
    steps: list[Step] = []
    columns = hidden * len(modes)
    for kind, name in modules[2:]:
        if kind == "Normalize":
            _expect(folder / name / "config.json", "module_input_name", "sentence_embedding")
            steps.append(_normalize)
        elif kind == "Dense":
            dense, columns = _dense(folder / name, columns)
            steps.append(dense)
        elif kind != "Dropout":  # it has no effect outside of training
            raise Unsupported("modules.json type", kind, "must be Dense, Normalize or Dropout here", "Normalize")
    cut = sentence_config(folder).get("truncate_dim")
    if cut is not None:
        if type(cut) is not int or cut < 1:
            raise InvalidRequest("truncate_dim", cut, "must be an int >= 1 in config_sentence_transformers.json")
        columns = min(columns, cut)
        steps.append(lambda y: np.ascontiguousarray(y[:, :cut]))
    return Head(modes, tuple(steps), columns)


def _module(path: Path, module: Any) -> tuple[str, str]:
    kind, name = (module.get("type"), module.get("path", "")) if isinstance(module, dict) else (None, None)
    if not isinstance(kind, str) or not isinstance(name, str):
        raise InvalidRequest("model", str(path), "must hold a list of objects with type and path")
    package, _, class_name = kind.rpartition(".")
    # A model's own module may have any name, so its package stays in it.
    return (class_name if package.split(".")[0] == "sentence_transformers" else kind), name


def _modes(folder: Path, name: str) -> tuple[str, ...]:
    path = folder / name / "config.json"
    config = read_json(path, dict)
    modes = config.get("pooling_mode", tuple(mode for flag, mode in _FLAGS.items() if config.get(flag)) or "mean")
    modes = (modes,) if isinstance(modes, str) else tuple(modes) if isinstance(modes, (list, tuple)) else ()
    if not modes:
        raise InvalidRequest("pooling_mode", config.get("pooling_mode"), f"must be a mode or several in {path}")
    for mode in modes:
        if not isinstance(mode, str) or mode not in _POOLING:
            raise Unsupported("pooling_mode", mode, f"known here: {', '.join(_POOLING)}", "mean")
    if load_prompt(folder) and config.get("include_prompt") is False:
        raise Unsupported("include_prompt", False, "must be true where texts have a prompt", True)
    return modes


def _dense(folder: Path, columns: int) -> tuple[Step, int]:
    path = folder / "config.json"
    config = read_json(path, dict)
    _expect(path, "module_input_name", "sentence_embedding")
    _expect(path, "use_residual", False)
    into, out, name = (
        config.get("in_features"),
        config.get("out_features"),
        config.get("activation_function", "torch.Tanh"),
    )
    if into != columns or type(out) is not int or out < 1:
        raise InvalidRequest("model", str(path), f"must have in_features {columns}, as the rows, and out_features")
    package, _, class_name = str(name).rpartition(".")
    if class_name not in _ACTIVATIONS or package.split(".")[0] != "torch":
        raise Unsupported("activation_function", name, f"known here: {', '.join(_ACTIVATIONS)} of torch", "Identity")
    if not (folder / "model.safetensors").is_file():
        raise InvalidRequest("model", str(folder), "must hold model.safetensors")
    linear = Linear.read(load_tensors(folder), "linear", out, columns, bias=config.get("bias", True))
    activation = _ACTIVATIONS[class_name]
    return lambda y: activation(linear(y)), out


def _expect(path: Path, name: str, value: Any) -> None:
    """Raise `Unsupported` if a module's file has this option with another value."""
    config: Mapping[str, Any] = read_json(path, dict) if path.is_file() else {}
    if config.get(name, value) != value:
        raise Unsupported(name, config[name], f"is not what is computed here ({path})", value)


def _cls(x: Floats, batch: TokenBatch) -> Floats:
    return x[batch.cu_seqlens[:-1]]


def _max(x: Floats, batch: TokenBatch) -> Floats:
    largest: Floats = np.maximum.reduceat(x, batch.cu_seqlens[:-1], axis=0)
    return largest


def _mean(x: Floats, batch: TokenBatch) -> Floats:
    sums = np.add.reduceat(x, batch.cu_seqlens[:-1], axis=0)
    lengths = np.diff(batch.cu_seqlens).astype(np.float32)
    means: Floats = np.divide(sums, lengths[:, None], dtype=np.float32)
    return means


_POOLING = {"cls": _cls, "max": _max, "mean": _mean}


def _normalize(y: Floats) -> Floats:
    norms = np.sqrt(np.einsum("nd,nd->n", y, y))
    unit: Floats = y / np.maximum(norms, np.float32(1e-12))[:, None]
    return unit


def _sigmoid(y: Floats) -> Floats:
    half: Floats = np.float32(0.5) * (np.tanh(np.float32(0.5) * y) + np.float32(1))
    return half


_ACTIVATIONS: dict[str, Step] = {
    "Identity": lambda y: y,
    "Tanh": np.tanh,
    "ReLU": lambda y: np.maximum(y, np.float32(0)),
    "GELU": gelu_inplace,
    "Sigmoid": _sigmoid,
}
