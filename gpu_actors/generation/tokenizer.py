"""Text to tokens and back: the tokenizer of a model's folder, by Transformers, or bytes for the built-in model."""

from __future__ import annotations

import codecs
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from gpu_actors.errors import InvalidRequest
from gpu_actors.extras import missing
from gpu_actors.generation.config import LlamaConfig

__all__ = [
    "ByteTokenizer",
    "FolderTokenizer",
    "TextStream",
    "Tokenizer",
    "ended_by",
    "load_tokenizer",
    "transformers_module",
]

_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
_OTHER_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_NO_SENTENCEPIECE = "; to read a tokenizer.model, Transformers needs `pip install sentencepiece protobuf`"


class TextStream:
    """Makes a text from its tokens, one after another.

    A character of several tokens is returned with the last of them, so at most 3 bytes wait.

    pieces: called with the token before (None: no token) and a token. Returns the bytes that the token adds, or None if
        the token has no text.
    """

    def __init__(self, pieces: Callable[[int | None, int], bytes | None]) -> None:
        self._pieces = pieces
        self._previous: int | None = None
        # The decoder buffers the bytes of an incomplete character, and decodes bytes that are not UTF-8 as U+FFFD.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """The text that this token completes."""
        data = self._pieces(self._previous, token)
        if data is None:
            return ""
        self._previous = token
        return self._decoder.decode(data)

    def end(self) -> str:
        """One U+FFFD for an incomplete character, else nothing."""
        return self._decoder.decode(b"", final=True)


class Tokenizer(Protocol):
    """The methods that the engine's callers use. Several threads may call them.

    special: the tokens that no text shows, with their names.
    end_tokens: each of them ends a text, beside those of the model's configuration.
    longest_token: the most bytes of a token, infinite if one may stand for any text. A text of N tokens has at most N
        times as many bytes.
    """

    special: Mapping[int, str]
    end_tokens: Sequence[int]
    longest_token: float

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without those that begin or end it."""

    def prompt(self, text: str) -> list[int]:
        """The tokens of a text that a model continues, with those that the tokenizer adds around it."""

    def offsets(self, text: str) -> list[int]:
        """For each token of `prompt`, the number of the text's characters before it."""

    def bytes_of(self, token: int) -> bytes:
        """The UTF-8 bytes that a token adds to a text that it continues. They may be a part of a character."""

    def stream(self, begins: bool = False) -> TextStream:
        """A stream for a new text. It shows special tokens too.

        begins: whether the text continues no other one. It then lacks the space that the tokenizer puts before a text.
        """


class ByteTokenizer:
    """Each byte of UTF-8 is a token. 256 begins a text, 257 ends it. Neither is shown."""

    special: Mapping[int, str] = {}
    end_tokens: Sequence[int] = (257,)
    longest_token: float = 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def prompt(self, text: str) -> list[int]:
        return [256, *text.encode()]

    def offsets(self, text: str) -> list[int]:
        return [0, *(index for index, character in enumerate(text) for _ in character.encode())]

    def bytes_of(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def stream(self, begins: bool = False) -> TextStream:
        return TextStream(lambda previous, token: self.bytes_of(token))


class FolderTokenizer:
    """A tokenizer of Transformers. transformers: the object itself, with its chat template."""

    def __init__(self, transformers: Any) -> None:
        self.transformers = transformers
        added = transformers.added_tokens_decoder
        self.special: Mapping[int, str] = {token: each.content for token, each in added.items() if each.special}
        end = transformers.eos_token_id
        self.end_tokens: Sequence[int] = () if end is None else (end,)
        self._byte_level = self._text(["a", "Ġ"]) == "a "
        self._has_byte_tokens = self._text(["a", "<0x41>"]) == "aA"
        # Whether every byte has a token. If not, one unknown token stands for any text.
        exact = self._byte_level or self._has_byte_tokens
        names = transformers.get_vocab()
        self.longest_token: float = max(len(name.encode()) for name in names) if exact else math.inf
        # The first call removes the truncation and the padding of the training. This removal is not thread-safe.
        self.encode("")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.transformers.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def prompt(self, text: str) -> list[int]:
        ids: list[int] = self.transformers.encode(text, verbose=False)
        return ids

    def offsets(self, text: str) -> list[int]:
        offsets, end = [], 0
        for start, stop in self._spans(text):
            # A span may leave out the space before it. The span of a part of a character is the whole character's.
            offsets.append(min(start, end) if start < stop else end)
            end = max(end, stop)
        return offsets

    def _spans(self, text: str) -> Iterator[tuple[int, int]]:
        if self.transformers.is_fast:
            yield from self.transformers(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]
            return
        stream, end = self.stream(begins=True), 0
        for token in self.prompt(text):
            name = self.special.get(token)
            start = end
            if name is None or text.startswith(name, start):
                end += len(stream.feed(token))
            yield start, end

    def bytes_of(self, token: int) -> bytes:
        return self._piece(None, token) or b""

    def _piece(self, previous: int | None, token: int) -> bytes | None:
        """The bytes that ``token`` adds to a text that ends with ``previous``, or to any text if ``previous`` is None.

        None for a token that only the model has: its vocabulary may be larger than the tokenizer's.
        """
        name = self._name(token)
        if name is None:
            return None
        if self._byte_level:
            return _byte_level_bytes(name)
        if self._is_byte(name):
            return bytes.fromhex(name[3:5])
        # Decoders treat the first token of a text differently, and may remove its space. So another one comes first.
        context = ["a"]
        if previous is not None and (previous_name := self._name(previous)) and not self._is_byte(previous_name):
            context.append(previous_name)
        return self._text([*context, name])[len(self._text(context)) :].encode()

    def stream(self, begins: bool = False) -> TextStream:
        return TextStream(self._first_or_piece if begins else self._piece)

    def _first_or_piece(self, previous: int | None, token: int) -> bytes | None:
        name = self._name(token)
        if previous is not None or name is None or self._byte_level or self._is_byte(name):
            return self._piece(previous, token)
        return self._text([name]).encode()

    def _name(self, token: int) -> str | None:
        name: str | None = self.transformers.convert_ids_to_tokens(token)
        return name

    def _is_byte(self, name: str) -> bool:
        return self._has_byte_tokens and re.fullmatch("<0x[0-9A-Fa-f]{2}>", name) is not None

    def _text(self, names: list[str]) -> str:
        text: str = self.transformers.convert_tokens_to_string(names)
        return text


def load_tokenizer(folder: Path | None) -> Tokenizer:
    """The tokenizer of a model's folder, or a `ByteTokenizer` for None.

    `transformers.AutoTokenizer` loads it and runs no code from the folder. Raises `InvalidRequest` for a folder without
    a tokenizer, and if Transformers (extra "serve") is missing or cannot read it.
    """
    return ByteTokenizer() if folder is None else FolderTokenizer(_load(folder))


def ended_by(config: LlamaConfig, tokenizer: Tokenizer) -> LlamaConfig:
    """The configuration, with texts that also end at the tokenizer's ``end_tokens``."""
    return replace(config, stop_tokens=tuple(dict.fromkeys([*config.stop_tokens, *tokenizer.end_tokens])))


def transformers_module(field: str, value: object) -> Any:
    """Import Transformers. Raises `InvalidRequest` for the field if it is missing."""
    # Without torch the import logs an advice to install it, which tokenizers and chat templates do not need.
    logger = logging.getLogger("transformers")
    logger.addFilter(_drop)
    try:
        import transformers
    except ImportError as error:
        raise InvalidRequest(field, value, missing(error, "serve")) from error
    finally:
        logger.removeFilter(_drop)
    return transformers


def _drop(record: logging.LogRecord) -> bool:
    return False


def _load(folder: Path) -> Any:
    names = [name for name in _FILES if (folder / name).is_file()]
    if not names:
        raise InvalidRequest("model", str(folder), f"must hold a tokenizer: one of {', '.join(_FILES)}")
    auto = transformers_module("model", str(folder)).AutoTokenizer
    try:
        return auto.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception, and Transformers several others
        hint = _NO_SENTENCEPIECE if names == ["tokenizer.model"] else ""
        names += [name for name in _OTHER_FILES if (folder / name).is_file()]
        reason = f"must hold a tokenizer that Transformers can read; of {', '.join(names)} it says: {error}{hint}"
        raise InvalidRequest("model", str(folder), reason) from error


def _gpt2_bytes() -> dict[str, int]:
    """GPT-2's alphabet of byte tokens: a printable character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_GPT2_BYTES = _gpt2_bytes()


def _byte_level_bytes(name: str) -> bytes:
    try:
        return bytes(_GPT2_BYTES[character] for character in name)
    except KeyError:
        # An added token is not spelled in that alphabet.
        return name.encode()
