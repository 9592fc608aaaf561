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


class TextStream(Protocol):
    """Makes a text from its tokens, one after another.

    A character of several tokens comes with the last of them, so that at most 3 bytes wait.
    """

    def feed(self, token: int) -> str:
        """The text that this token completes."""

    def end(self) -> str:
        """One U+FFFD for a character that has not been completed, else nothing."""


class Tokenizer(Protocol):
    """The methods that the engine's callers use. Safe to call from several threads.

    special: the tokens that no text shows, and what each is called. end_tokens: any of them ends a text, beside those
    that the model's configuration names. longest_token: bytes that a token stands for at most, infinite where one may
    stand for any text. A text of more bytes than so many for each token has more tokens.
    """

    special: Mapping[int, str]
    end_tokens: Sequence[int]
    longest_token: float

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without any that begins or ends it."""

    def prompt(self, text: str) -> list[int]:
        """The tokens of a text that a model continues, with those that the tokenizer puts around one."""

    def offsets(self, text: str) -> list[int]:
        """For each token of `prompt`, the characters of the text before it. A token that is put there has none."""

    def bytes_of(self, token: int) -> bytes:
        """What a token adds to a text that it continues, in UTF-8; a part of a character for a part of one."""

    def stream(self, begins: bool = False) -> TextStream:
        """A new text. It shows the special tokens that it is fed, too.

        begins: the text continues none, so it lacks the space that the tokenizer itself puts before a text.
        """


class ByteTokenizer:
    """A token a byte of UTF-8. 256 begins a text, 257 ends it; neither shows as text."""

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
        return _Stream(lambda before, token: self.bytes_of(token))


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
        # Where every byte has a token. Elsewhere one unknown token stands for any text.
        exact = self._byte_level or self._has_byte_tokens
        names = transformers.get_vocab()
        self.longest_token: float = max(len(name.encode()) for name in names) if exact else math.inf
        # The first call takes the truncation and the padding of the training away, which is not safe beside others.
        self.encode("")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.transformers.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def prompt(self, text: str) -> list[int]:
        ids: list[int] = self.transformers.encode(text, verbose=False)
        return ids

    def offsets(self, text: str) -> list[int]:
        found, end = [], 0
        for start, stop in self._spans(text):
            # A span may leave out the space before it, and be that of a character that its token is a part of.
            found.append(min(start, end) if start < stop else end)
            end = max(end, stop)
        return found

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

    def _piece(self, before: int | None, token: int) -> bytes | None:
        """What ``token`` adds to a text that ends with the token ``before``; to any text where that is None.

        None for a token that only the model has: its vocabulary may be the larger one.
        """
        name = self._name(token)
        if name is None:
            return None
        if self._byte_level:
            return _unshown(name)
        if self._is_byte(name):
            return bytes.fromhex(name[3:5])
        # Decoders treat the first token of a text otherwise, as taking its space away: here it is always another one.
        context = ["a"]
        if before is not None and (last := self._name(before)) and not self._is_byte(last):
            context.append(last)
        return self._text([*context, name])[len(self._text(context)) :].encode()

    def stream(self, begins: bool = False) -> TextStream:
        return _Stream(self._first_or_piece if begins else self._piece)

    def _first_or_piece(self, before: int | None, token: int) -> bytes | None:
        name = self._name(token)
        if before is not None or name is None or self._byte_level or self._is_byte(name):
            return self._piece(before, token)
        return self._text([name]).encode()

    def _name(self, token: int) -> str | None:
        name: str | None = self.transformers.convert_ids_to_tokens(token)
        return name

    def _is_byte(self, name: str) -> bool:
        return self._has_byte_tokens and re.fullmatch("<0x[0-9A-Fa-f]{2}>", name) is not None

    def _text(self, names: list[str]) -> str:
        text: str = self.transformers.convert_tokens_to_string(names)
        return text


class _Stream:
    """pieces: the bytes that a token adds to a text, by the token before it and itself; None for what is no token."""

    def __init__(self, pieces: Callable[[int | None, int], bytes | None]) -> None:
        self._pieces = pieces
        self._before: int | None = None
        # Keeps the bytes of an incomplete character, and shows bytes that are not UTF-8 as U+FFFD.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        data = self._pieces(self._before, token)
        if data is None:
            return ""
        self._before = token
        return self._decoder.decode(data)

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


def load_tokenizer(folder: Path | None) -> Tokenizer:
    """The tokenizer of a model's folder, or a `ByteTokenizer` for None.

    It is `transformers.AutoTokenizer`'s, without code from the folder. Raises `InvalidRequest` for a folder without
    one, and where Transformers (extra "serve") is missing or cannot read it.
    """
    return ByteTokenizer() if folder is None else FolderTokenizer(_load(folder))


def ended_by(config: LlamaConfig, tokenizer: Tokenizer) -> LlamaConfig:
    """The configuration whose texts also end at the tokenizer's ``end_tokens``."""
    return replace(config, stop_tokens=tuple(dict.fromkeys([*config.stop_tokens, *tokenizer.end_tokens])))


def transformers_module(field: str, value: object) -> Any:
    """Import Transformers. Raises `InvalidRequest` of the field where it is missing."""
    # Without torch the import advises to install it, which tokenizers and chat templates do not need.
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


def _shown_bytes() -> dict[str, int]:
    """GPT-2's alphabet, in which tokens of bytes are spelled: a printable character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_SHOWN_BYTES = _shown_bytes()


def _unshown(name: str) -> bytes:
    try:
        return bytes(_SHOWN_BYTES[character] for character in name)
    except KeyError:
        # An added token is spelled as it is.
        return name.encode()
