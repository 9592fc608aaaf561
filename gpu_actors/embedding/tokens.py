"""Turns texts into token ids, and token ids into packed batches of bounded size."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpu_actors.embedding.weights import load_prompt, lowers_case
from gpu_actors.errors import InvalidRequest
from gpu_actors.extras import missing
from gpu_actors.fields import integer

__all__ = ["TokenBatch", "TokenRow", "TokenSpan", "Tokenizer", "pack", "token_batches"]

Ints = NDArray[np.int32]
ENCODE_AT_ONCE = 256
"""Texts in one call of the tokenizer: enough to use its threads, few enough to start the first batch soon."""

MAX_TEXT_CHARS = 8192
"""Far more characters than 256 tokens have: about 1,200 in prose."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """The tokens of one text.

    ids: (tokens,) int32 with [CLS] and [SEP].
    truncated: whether a part of the text did not fit.
    """

    ids: Ints
    truncated: bool


class TokenSpan(NamedTuple):
    """The characters [start, stop) of a token, and the number of its word."""

    start: int
    stop: int
    word: int


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Texts packed row after row.

    ids, positions: (T,) int32, each token and its position in its text.
    cu_seqlens: (texts + 1,) int32, the start of each text, and T.
    max_seqlen: rows of the longest text.
    truncated: a flag for each text.
    """

    ids: Ints
    positions: Ints
    cu_seqlens: Ints
    max_seqlen: int
    truncated: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1


class Tokenizer:
    """The model's WordPiece tokenizer. Safe to call from several threads.

    max_tokens: the most tokens of a text, [CLS] and [SEP] included, as in sentence-transformers.
    max_text_chars: the most characters of a text that are read. It limits the cost of a text.
    prompt: the prefix of every encoded text, from the folder's config_sentence_transformers.json.
    """

    def __init__(self, folder: Path, max_tokens: int = 256, max_text_chars: int = MAX_TEXT_CHARS) -> None:
        self.max_tokens: int = integer("max_tokens", max_tokens, 1)
        self.max_text_chars: int = integer("max_text_chars", max_text_chars, 1)
        self.prompt = load_prompt(folder)
        self._lowers_case = lowers_case(folder)
        self._whole = _load(folder)
        self._cutting = _load(folder)
        # As shipped, tokenizer.json pads and cuts every text to 128 tokens.
        self._whole.no_padding()
        self._whole.no_truncation()
        self._cutting.no_padding()
        self._cutting.enable_truncation(max_tokens)

    def encode(self, texts: Sequence[str], first: int = 0) -> list[TokenRow]:
        """The token ids of the prompt and the first ``max_text_chars`` characters, for each text.

        first: the number of ``texts[0]`` in errors. Raises `InvalidRequest` for a text that is not valid Unicode or has
        no token.
        """
        for index, text in enumerate(texts, first):
            check_text(text, f"texts[{index}]")
        heads = [text[: self._cut_at(text)] for text in texts]
        prompted = [self.prompt + head for head in heads]
        encodings = self._cutting.encode_batch([text.lower() for text in prompted] if self._lowers_case else prompted)
        for index, encoding in enumerate(encodings, first):
            if not encoding.ids:
                raise InvalidRequest(f"texts[{index}]", texts[index - first], "must have at least one token")
        return [
            TokenRow(np.array(encoding.ids, np.int32), bool(encoding.overflowing) or not _blank(text, len(head)))
            for text, head, encoding in zip(texts, heads, encodings, strict=True)
        ]

    def _cut_at(self, text: str) -> int:
        limit = self.max_text_chars
        if len(text) <= limit or text[limit].isspace():
            return limit
        # Half a word would be tokenized differently, so only a very long word is cut.
        return next((stop for stop in range(limit, limit // 2, -1) if text[stop - 1].isspace()), limit)

    def spans(self, text: str) -> list[TokenSpan]:
        """The spans of the tokens of a text of any length, without [CLS] and [SEP]."""
        check_text(text, "text")
        encoding = self._whole.encode(text, add_special_tokens=False)
        ends = zip(encoding.offsets, encoding.word_ids, strict=True)
        return [TokenSpan(start, stop, word) for (start, stop), word in ends]


def check_text(text: object, field: str) -> None:
    """Raise `InvalidRequest` unless ``text`` is a str that UTF-8 can encode."""
    if not isinstance(text, str):
        raise InvalidRequest(field, type(text).__name__, "must be a str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"must be valid Unicode; the character at {error.start} is a lone surrogate"
        raise InvalidRequest(field, ascii(text[error.start]), reason) from None


def _blank(text: str, start: int) -> bool:
    """Whether only white space follows from ``start`` on."""
    return re.compile(r"\s*\Z").match(text, start) is not None


def pack(rows: Sequence[TokenRow]) -> TokenBatch:
    """Pack at least one row into a batch."""
    lengths = [len(row.ids) for row in rows]
    return TokenBatch(
        ids=np.concatenate([row.ids for row in rows]),
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int32),
        max_seqlen=max(lengths),
        truncated=tuple(row.truncated for row in rows),
    )


def token_batches(tokenizer: Tokenizer, texts: Iterable[str], batch_tokens: int) -> Iterator[TokenBatch]:
    """Pack texts in order into batches of at most ``batch_tokens`` tokens (but at least one text).

    It tokenizes lazily, so that memory holds a few hundred rows for any number of texts.
    """
    rows: list[TokenRow] = []
    tokens = 0
    for row in _encode_in_groups(tokenizer, texts):
        if rows and tokens + len(row.ids) > batch_tokens:
            yield pack(rows)
            rows, tokens = [], 0
        rows.append(row)
        tokens += len(row.ids)
    if rows:
        yield pack(rows)


def _encode_in_groups(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[TokenRow]:
    remaining = iter(texts)
    first = 0
    while group := list(islice(remaining, ENCODE_AT_ONCE)):
        yield from tokenizer.encode(group, first)
        first += len(group)


def _load(folder: Path) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise InvalidRequest("model", str(folder), missing(error, "demo")) from error
    try:
        return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises bare Exception
        raise InvalidRequest("model", str(folder), f"tokenizer.json is not readable: {error}") from error
