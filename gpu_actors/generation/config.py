"""LlamaConfig: the sizes of a model, as in config.json of a Hugging Face repository."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.fields import expect, integer
from gpu_actors.model_files import expect_entries, read_json
from gpu_actors.values import show

__all__ = ["LlamaConfig", "frequencies"]

# The model that is computed here. A config.json with other values is refused.
_FIXED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_FREQUENCY_SCALINGS = ("default", "linear", "llama3")

_SIZES = ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "positions")

_MOST = 1 << 14
"""The limit of layers and of columns of a head: more than any model has, and few enough to list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The sizes of a model.

    hidden: columns of the residual stream.
    inv_freq: the rotation of each pair of a head's columns, in radians per position.
    stop_tokens: each of them ends a text.
    begin_token: the first token of a text, or None. The tokenizer decides whether a prompt gets it.

    Raises `InvalidRequest` for an impossible value, with the field's name.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    positions: int
    norm_eps: float = 1e-5
    inv_freq: tuple[float, ...]
    tied: bool = False
    begin_token: int | None = None
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in _SIZES:
            integer(name, getattr(self, name), 1)
        expect(self.layers <= _MOST, "layers", self.layers, f"must be at most {_MOST}")
        expect(self.heads % self.kv_heads == 0, "kv_heads", self.kv_heads, f"must divide heads={self.heads}")
        expect(0 <= self.norm_eps < math.inf, "norm_eps", self.norm_eps, "must be a finite number >= 0")
        sound = 2 * len(self.inv_freq) == self.head_dim and all(0 < each < math.inf for each in self.inv_freq)
        reason = f"must be {self.head_dim / 2:g} finite numbers > 0, one for each pair of a head's columns"
        expect(sound, "inv_freq", show(self.inv_freq), reason)
        sound = all(type(token) is int and 0 <= token < self.vocab for token in self.stop_tokens)
        expect(sound, "stop_tokens", self.stop_tokens, f"must be tokens from 0 to {self.vocab - 1}")

    @classmethod
    def tiny(
        cls,
        *,
        vocab: int = 258,
        hidden: int = 128,
        layers: int = 2,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 32,
    ) -> LlamaConfig:
        """A small model for tests and demonstrations, with the vocabulary of `ByteTokenizer`."""
        return cls(
            vocab=vocab,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=2 * hidden,
            positions=4096,
            inv_freq=frequencies(head_dim, {"rope_theta": 10000.0}),
            begin_token=256 if vocab > 256 else None,
            stop_tokens=(257,) if vocab > 257 else (),
        )

    @classmethod
    def load(cls, folder: Path) -> LlamaConfig:
        """Read config.json, and the tokens that end a text from generation_config.json if there is one.

        Raises `InvalidRequest` if a file is broken, `Unsupported` for another architecture.
        """
        path = folder / "config.json"
        entries = read_json(path, dict)
        generation_config = folder / "generation_config.json"
        # Of a model that was trained on conversations, only this file names the token that ends a message.
        if generation_config.is_file() and (end := read_json(generation_config, dict).get("eos_token_id")) is not None:
            entries["eos_token_id"] = end
        expect_entries(entries, _FIXED)
        try:
            return _from_json(entries)
        except InvalidRequest as error:
            raise InvalidRequest("model", str(path), f"has {error}") from error
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise InvalidRequest("model", str(path), f"lacks a usable entry: {error!r}") from error


def _from_json(entries: dict[str, Any]) -> LlamaConfig:
    heads = integer("num_attention_heads", int(entries["num_attention_heads"]), 1)
    hidden = int(entries["hidden_size"])
    head_dim = int(entries.get("head_dim") or hidden // heads)
    # Newer files have rope_parameters, older ones rope_theta and, if it is scaled, rope_scaling.
    rope = {"rope_theta": entries.get("rope_theta", 10000.0)}
    rope |= entries.get("rope_scaling") or {}
    rope |= entries.get("rope_parameters") or {}
    begin, end = entries.get("bos_token_id"), entries.get("eos_token_id")
    stop = end if isinstance(end, list) else [] if end is None else [end]
    return LlamaConfig(
        vocab=int(entries["vocab_size"]),
        hidden=hidden,
        layers=int(entries["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(entries.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate=int(entries["intermediate_size"]),
        positions=int(entries["max_position_embeddings"]),
        norm_eps=float(entries["rms_norm_eps"]),
        inv_freq=frequencies(head_dim, rope),
        tied=bool(entries.get("tie_word_embeddings", False)),
        begin_token=None if begin is None else int(begin),
        stop_tokens=tuple(int(token) for token in stop),
    )


def frequencies(head_dim: int, rope: dict[str, Any]) -> tuple[float, ...]:
    """The rotation of each pair of columns in radians per position, scaled as ``rope_type`` says.

    Raises `Unsupported` for an unknown scaling, `InvalidRequest` for impossible numbers.
    """
    sound = head_dim % 2 == 0 and 2 <= head_dim <= _MOST
    expect(sound, "head_dim", head_dim, f"must be an even int from 2 to {_MOST}")
    base = _positive(rope, "rope_theta")
    plain = [base ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _FREQUENCY_SCALINGS:
        raise Unsupported("config.json rope_type", kind, f"known here: {', '.join(_FREQUENCY_SCALINGS)}", "default")
    if kind == "linear":
        factor = _positive(rope, "factor")
        return tuple(frequency / factor for frequency in plain)
    if kind == "llama3":
        return tuple(_llama3(frequency, rope) for frequency in plain)
    return tuple(plain)


def _llama3(frequency: float, rope: dict[str, Any]) -> float:
    """Divide low frequencies by ``factor``, keep high ones, and interpolate between (Llama 3.1's rule)."""
    low, high = _positive(rope, "low_freq_factor"), _positive(rope, "high_freq_factor")
    expect(low < high, "high_freq_factor", high, f"must be more than low_freq_factor={low}")
    turns = _positive(rope, "original_max_position_embeddings") * frequency / math.tau
    share = min(1.0, max(0.0, (turns - low) / (high - low)))
    return share * frequency + (1.0 - share) * frequency / _positive(rope, "factor")


def _positive(rope: dict[str, Any], name: str) -> float:
    value = float(rope[name])
    expect(0 < value < math.inf, name, value, "must be a finite number > 0")
    return value
