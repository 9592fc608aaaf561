"""Text to tokens and back: the model's own tokenizer.json, or bytes where there is none."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from gpu_actors import InvalidRequest
from gpu_actors.extras import missing

__all__ = ["ByteTokenizer", "Tokenizer", "load_tokenizer"]


class Tokenizer(Protocol):
    """The methods that the engine's callers use."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without any that begins or ends it."""

    def stream(self) -> Callable[[int], str]:
        """A function that takes the tokens of one text in turn and gives the text that each completes."""


class ByteTokenizer:
    """A token a byte of UTF-8. 256 begins a text, 257 ends it; neither shows as text."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def stream(self) -> Callable[[int], str]:
        # Keeps the bytes of an incomplete character, and shows bytes that are not UTF-8 as U+FFFD.
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda token: decoder.decode(bytes([token])) if token < 256 else ""


class _FileTokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def stream(self) -> Callable[[int], str]:
        tokens: list[int] = []
        begun = shown = 0  # of the tokens: where decoding begins, and what is shown already

        def text_of(token: int) -> str:
            # A token's text depends on those just before it, so a few are decoded again and what is new is given.
            nonlocal begun, shown
            tokens.append(token)
            before: str = self._tokenizer.decode(tokens[begun:shown])
            text: str = self._tokenizer.decode(tokens[begun:])
            if len(text) <= len(before) or text.endswith("\N{REPLACEMENT CHARACTER}"):
                return ""
            begun, shown = shown, len(tokens)
            return text[len(before) :]

        return text_of


def load_tokenizer(folder: Path | None) -> Tokenizer:
    """The tokenizer.json of a folder, or a `ByteTokenizer` where there is none. Raises `InvalidRequest`."""
    path = None if folder is None else folder / "tokenizer.json"
    if path is None or not path.is_file():
        return ByteTokenizer()
    try:
        import tokenizers
    except ImportError as error:
        raise InvalidRequest("model", str(path), missing(error, "demo")) from error
    try:
        return _FileTokenizer(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # tokenizers raises bare Exception
        raise InvalidRequest("model", str(path), f"is not readable: {error}") from error
