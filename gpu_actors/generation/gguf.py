"""Models of Llama's family from one file in the GGUF format: sizes, weights, tokenizer and chat template.

The package gguf reads the file, and dequantizes matrices to float32. The format and the names in it:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_actors.errors import InvalidRequest, Unsupported
from gpu_actors.extras import missing
from gpu_actors.fields import expect, integer, real
from gpu_actors.generation.config import LlamaConfig, frequencies
from gpu_actors.generation.gguf_tokenizer import adds
from gpu_actors.generation.weights import Matrix, Weights, assemble, cores, dtype_of, tensor_names
from gpu_actors.model_files import FLOATS

__all__ = ["GgufFile"]

ARCHITECTURE = "llama"

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""The parts of tensors' names in Hugging Face's layout, and in GGUF files."""

_FACTORS = "rope_freqs.weight"
"""A tensor of Llama 3.1 and later with the divisor of each frequency."""

_CUT_OFF = "the file ends before what its header says is there"

_BLOCK = 65536
"""About how many elements are dequantized at a time."""

# Metadata of the architecture that this module reads.
_READ = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",
)
_WITHOUT_EFFECT = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length")
# Metadata of mixtures of experts. Converters write 0 for other models.
_ZERO = ("expert_count", "expert_used_count")


class GgufFile:
    """An open file. metadata: every value by its name.

    Raises `InvalidRequest` for a broken or truncated file, `Unsupported` for a model that is not of Llama's family.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._readable("header"):
            reader = _open(path)
            self.metadata: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        architecture = self.metadata.get("general.architecture")
        if architecture != ARCHITECTURE:
            raise self._unsupported(
                "general.architecture", architecture, "is not what this model computes", ARCHITECTURE
            )
        if reader.byte_order != "I":
            raise self._unsupported("byte order", "of another machine", "is not read here", "little endian")
        if (parts := self.metadata.get("split.count", 1)) not in (0, 1):
            raise self._unsupported("split.count", parts, "must be joined into one file", 1)
        with self._readable("metadata"):
            self.config: LlamaConfig = self._config()
        self._expect_known_tensors()

    def weights(self) -> Weights:
        """Every matrix as float32. Raises `InvalidRequest` for a tensor that is missing or of another shape."""
        rotated = {"attn_q": self.config.heads, "attn_k": self.config.kv_heads}

        def take(name: str, shape: tuple[int, ...]) -> Matrix:
            gguf_name = _gguf_name(name)
            matrix = self._tensor(gguf_name, shape)
            heads = rotated.get(gguf_name.split(".")[-2])
            return matrix if heads is None else _split_pairs(matrix, heads)

        weights = assemble(self.config, take, cores())
        matrices = [_gguf_name(name) for name, shape in tensor_names(self.config).items() if len(shape) == 2]
        forms = {_form(self._tensors[name]) for name in matrices}
        return weights._replace(stored=", ".join(sorted(forms)), dtype=dtype_of(forms))

    def _config(self) -> LlamaConfig:
        for name, value in self.metadata.items():
            key = name.removeprefix(f"{ARCHITECTURE}.")
            harmless = key in (*_READ, *_WITHOUT_EFFECT) or (key in _ZERO and value == 0)
            if key != name and not harmless:
                raise self._unsupported(name, value, "is not what this model computes")
        heads, hidden = self._integer("attention.head_count"), self._integer("embedding_length")
        head_dim = self._integer("attention.key_length", hidden // heads)
        for other in ("attention.value_length", "rope.dimension_count"):
            if (length := self._integer(other, head_dim)) != head_dim:
                raise self._unsupported(f"{ARCHITECTURE}.{other}", length, "must be the length of a key", head_dim)
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise self._invalid("lacks the tensor token_embd.weight")
        vocab, layers = int(embedding.shape[-1]), self._integer("block_count")
        if layers > len(self._tensors):
            raise self._invalid(f"has {ARCHITECTURE}.block_count={layers}, and only {len(self._tensors)} tensors")
        stop = [self._token(kind, vocab) for kind in ("eos", "eot", "eom")]
        return LlamaConfig(
            vocab=vocab,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=self._integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate=self._integer("feed_forward_length"),
            positions=self._integer("context_length"),
            norm_eps=self._real("attention.layer_norm_rms_epsilon"),
            inv_freq=self._frequencies(head_dim),
            tied="output.weight" not in self._tensors,
            begin_token=adds(self.metadata, "bos"),
            stop_tokens=tuple(dict.fromkeys(token for token in stop if token is not None)),
        )

    def _frequencies(self, head_dim: int) -> tuple[float, ...]:
        """The rotations in radians a position, scaled by one factor, by the factors of a tensor, or by both."""
        factor = self._real("rope.scaling.factor", self._real("rope.scale_linear", 0.0))
        kind = self.metadata.get(f"{ARCHITECTURE}.rope.scaling.type", "linear")
        if kind not in ("none", "linear"):
            raise self._unsupported(
                f"{ARCHITECTURE}.rope.scaling.type", kind, "is not what this model computes", "linear"
            )
        rope: dict[str, Any] = {"rope_theta": self._real("rope.freq_base", 10000.0)}
        if kind == "linear" and factor:
            rope |= {"rope_type": "linear", "factor": factor}
        plain = frequencies(head_dim, rope)
        if _FACTORS not in self._tensors:
            return plain
        factors = self._tensor(_FACTORS, (head_dim // 2,)).tolist()
        return tuple(frequency / by for frequency, by in zip(plain, factors, strict=True))

    def _expect_known_tensors(self) -> None:
        names = {_gguf_name(name) for name in tensor_names(self.config)}
        for name in self._tensors:
            if name not in names and name != _FACTORS:
                raise self._unsupported("tensor", name, "is none of those that this model computes with")

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Matrix:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise self._invalid(f"lacks the tensor {name} of shape {shape}")
        stored_shape = tuple(int(size) for size in reversed(tensor.shape))
        if stored_shape != shape:
            raise self._invalid(f"has the tensor {name} of shape {stored_shape} where its metadata ask for {shape}")
        from gguf import dequantize

        # Dequantize a block of rows at a time: the first access to new memory costs more than the arithmetic. The
        # result's transpose is contiguous. A block is passed as one row, because the package iterates over 16 rows.
        matrix: Matrix = np.empty(shape[::-1], np.float32).T
        rows = max(64, _BLOCK // shape[-1]) if len(shape) == 2 else shape[0]
        try:
            with self._readable(name):
                for row in range(0, shape[0], rows):
                    block = tensor.data[row : row + rows].reshape(1, -1)
                    matrix[row : row + rows] = dequantize(block, tensor.tensor_type).reshape(-1, *shape[1:])
                return matrix
        except NotImplementedError as error:
            form = tensor.tensor_type.name
            raise self._unsupported(name, form, "is a form that gguf cannot give back as float32") from error

    def _token(self, kind: str, vocab: int) -> int | None:
        name = f"tokenizer.ggml.{kind}_token_id"
        token = self.metadata.get(name)
        if token is not None and (type(token) is not int or not 0 <= token < vocab):
            raise self._invalid(f"has {name}={token!r}, which must be a token from 0 to {vocab - 1}")
        return token

    def _integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, list):
            raise self._unsupported(f"{ARCHITECTURE}.{key}", value, "must be the same for every layer")
        return integer(f"{ARCHITECTURE}.{key}", value, 1)

    def _real(self, key: str, default: float | None = None) -> float:
        name, kind = f"{ARCHITECTURE}.{key}", "a finite number >= 0"
        value = real(name, self._value(key, default), kind)
        expect(value >= 0, name, value, f"must be {kind}")
        return value

    def _value(self, key: str, default: Any) -> Any:
        value = self.metadata.get(f"{ARCHITECTURE}.{key}", default)
        if value is None:
            raise self._invalid(f"lacks the metadata {ARCHITECTURE}.{key}")
        return value

    @contextmanager
    def _readable(self, part: str) -> Iterator[None]:
        try:
            yield
        except (Unsupported, NotImplementedError):
            raise
        except InvalidRequest as error:
            if error.field == "model":
                raise
            raise self._invalid(f"has {error}") from error
        except Exception as error:  # the package hardly checks its input
            raise self._invalid(f"is not a readable GGUF file ({part}): {error!r}") from error

    def _invalid(self, reason: str) -> InvalidRequest:
        return InvalidRequest("model", str(self.path), reason)

    def _unsupported(self, field: str, value: object, reason: str, nearest: object = None) -> Unsupported:
        return Unsupported(f"{self.path.name}: {field}", value, reason, nearest)


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader, GGUFValueType
    except ImportError as error:
        raise InvalidRequest("model", str(path), missing(error, "serve")) from error

    class Reader(GGUFReader):  # type: ignore[misc]  # which has no types here
        """Reads three times as fast as the package's own reader, and refuses a truncated file."""

        @property
        def data(self) -> NDArray[np.uint8]:
            return self._data

        @data.setter
        def data(self, mapped: NDArray[np.uint8]) -> None:
            # Each of the many small slices of a memmap would be a memmap, which is slow to create.
            self._data = mapped.view(np.ndarray)

        def _get(self, offset: int, *arguments: Any, **options: Any) -> Any:
            # A slice past the end is empty, and a header that states more data would be read forever.
            if offset > len(self._data):
                raise ValueError(_CUT_OFF)
            return super()._get(offset, *arguments, **options)

        def _get_field_parts(self, offset: int, kind: int) -> tuple[int, list[Any], list[int], list[Any]]:
            # A vocabulary and its merges are most of a header. With one call for each item they take 150,000 calls.
            of = GGUFValueType(self._get(offset, np.uint32)[0]) if kind == GGUFValueType.ARRAY else None
            if of in (None, GGUFValueType.ARRAY) or self.byte_order != "I":
                return super()._get_field_parts(offset, kind)  # type: ignore[no-any-return]
            count, begin = int(self._get(offset + 4, np.uint64)[0]), offset + 12
            if of == GGUFValueType.STRING:
                items, end = self._texts(begin, count)
            else:
                numbers = self._get(begin, self.gguf_scalar_to_np[of], count)
                items, end = [numbers], begin + count * numbers.itemsize
            if end > len(self._data):
                raise ValueError(_CUT_OFF)
            return end - offset, items, list(range(len(items))), [GGUFValueType.ARRAY, of]

        def _texts(self, end: int, count: int) -> tuple[list[NDArray[np.uint8]], int]:
            texts = []
            for _ in range(count):
                begin = end + 8
                end = begin + int.from_bytes(self._data[end:begin].tobytes(), sys.byteorder)
                if end > len(self._data):
                    raise ValueError(_CUT_OFF)
                texts.append(self._data[begin:end])
            return texts, end

    return Reader(path)


def _gguf_name(name: str) -> str:
    part = name.removesuffix(".weight")
    if not part.startswith("model.layers."):
        return f"{_NAMES[part]}.weight"
    _, _, layer, kind = part.split(".", 3)
    return f"blk.{layer}.{_NAMES[kind]}.weight"


def _form(tensor: Any) -> str:
    name: str = tensor.tensor_type.name
    return FLOATS.get(name, name)


def _split_pairs(matrix: Matrix, heads: int) -> Matrix:
    """Reorder rows of q or k from interleaved pairs to the first elements of all pairs before the second ones."""
    pairs = matrix.reshape(heads, -1, 2, matrix.shape[1])
    return pairs.swapaxes(1, 2).reshape(matrix.shape)
