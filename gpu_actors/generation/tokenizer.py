"""Text to tokens and back: the model's own tokenizer.json, or bytes where there is none."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any, Protocol

from gpu_actors.errors import InvalidRequest
from gpu_actors.extras import missing

__all__ = ["ByteTokenizer", "TextStream", "Tokenizer", "load_tokenizer"]


class TextStream(Protocol):
    """Makes a text from its tokens, one after another. A character of several tokens comes with the last of them."""

    def feed(self, token: int) -> str:
        """The text that this token completes."""

    def end(self) -> str:
        """The text of what was held back: U+FFFD for a character that has not been completed."""


class Tokenizer(Protocol):
    """The methods that the engine's callers use. Safe to call from several threads.

    longest_token: bytes of the longest one. A text of more bytes than so many for each token has more tokens.
    """

    longest_token: int

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without any that begins or ends it."""

    def stream(self) -> TextStream:
        """A new text."""


class ByteTokenizer:
    """A token a byte of UTF-8. 256 begins a text, 257 ends it; neither shows as text."""

    longest_token: int = 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def stream(self) -> TextStream:
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        # Keeps the bytes of an incomplete character, and shows bytes that are not UTF-8 as U+FFFD.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if token < 256 else ""

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class _FileTokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.longest_token: int = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def stream(self) -> TextStream:
        return _FileStream(self._tokenizer)


class _FileStream:
    """A token's text depends on those just before it, so a few are decoded again and what is new is given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0  # of the tokens

    def feed(self, token: int) -> str:
        self._tokens.append(token)
        text = self._new()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        # What is shown now is the beginning of what is decoded next.
        self._tokens = self._tokens[self._shown :]
        self._shown = len(self._tokens)
        return text

    def end(self) -> str:
        text = self._new()
        self._tokens, self._shown = [], 0
        return text

    def _new(self) -> str:
        before: str = self._tokenizer.decode(self._tokens[: self._shown])
        text: str = self._tokenizer.decode(self._tokens)
        return text[len(before) :]


def load_tokenizer(folder: Path | None) -> Tokenizer:
    """The tokenizer.json of a folder, or a `ByteTokenizer` where there is none. Raises `InvalidRequest`."""
    path = None if folder is None else folder / "tokenizer.json"
    if path is None or not path.is_file():
        return ByteTokenizer()
    try:
        import tokenizers
    except ImportError as error:
        raise InvalidRequest("model", str(path), missing(error, "serve")) from error
    try:
        return _FileTokenizer(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # tokenizers raises bare Exception
        raise InvalidRequest("model", str(path), f"is not readable: {error}") from error
