"""Text files to passages that fit the model, with nothing lost.

A passage is a paragraph. One that is too long is cut at the end of a sentence or line, else between words;
one that is very short (a heading) is joined to the paragraph after it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_actors.embedding.tokens import Tokenizer, TokenSpan
from gpu_actors.errors import InvalidRequest

__all__ = ["Passage", "read_passages", "read_text", "split_passages"]

PARAGRAPH = re.compile(r"\S[^\n]*(?:\n[^\S\n]*\S[^\n]*)*")
SENTENCE_END = re.compile(r"[.!?:;][\"')\]]*\s|\n")
SPECIAL_TOKENS = 2
HEADING_TOKENS = 16
"""Paragraphs below this many tokens are joined to the next: a bare heading would outrank the text it stands
above.
"""
WINDOW = 2048
"""Characters tokenized to find one cut; 254 tokens of prose are some 1,200."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a file. line: where it starts, from 1. The text is the file's own, stripped at its ends."""

    file: str
    line: int
    text: str


def read_passages(file: str, tokenizer: Tokenizer) -> list[Passage]:
    """The passages of a UTF-8 text file ("-": standard input). Raises `InvalidRequest` naming the file."""
    text = read_text(file)
    passages: list[Passage] = []
    line, counted = 1, 0
    for start, stop in split_passages(text, tokenizer):
        line += text.count("\n", counted, start)
        counted = start
        passages.append(Passage(file, line, text[start:stop]))
    return passages


def read_text(file: str) -> str:
    """The contents of a UTF-8 text file ("-": standard input). Raises `InvalidRequest` where there is no
    text.
    """
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except FileNotFoundError:
        raise InvalidRequest("file", file, "does not exist") from None
    except IsADirectoryError:
        raise InvalidRequest("file", file, "is a folder; name the text files in it") from None
    except OSError as error:
        raise InvalidRequest("file", file, f"cannot be read: {error.strerror or error}") from None
    if b"\0" in data:
        raise InvalidRequest("file", file, "is a binary file; only UTF-8 text can be embedded")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 text (byte {error.start}); convert it, for example with `iconv -t UTF-8`"
        raise InvalidRequest("file", file, reason) from None
    if not text.strip():
        raise InvalidRequest("file", file, "is empty; there is nothing to embed")
    return text


def split_passages(text: str, tokenizer: Tokenizer) -> Iterator[tuple[int, int]]:
    """Character ranges [start, stop) of the passages of a text, in order, each of at most ``max_tokens``
    tokens.

    Only white space lies between them.
    """
    room = max(1, tokenizer.max_tokens - SPECIAL_TOKENS)
    joined: int | None = None
    for start, stop in _paragraphs(text):
        if joined is not None:
            if _fits(text[joined:stop], tokenizer, room):
                start = joined
            else:
                yield _stripped(text, joined, start)
            joined = None
        if _fits(text[start:stop], tokenizer, min(room, HEADING_TOKENS - 1)):
            joined = start
            continue
        yield from _cut(text, start, stop, tokenizer, room)
    if joined is not None:
        yield _stripped(text, joined, len(text))


def _paragraphs(text: str) -> Iterator[tuple[int, int]]:
    return (match.span() for match in PARAGRAPH.finditer(text))


def _fits(text: str, tokenizer: Tokenizer, room: int) -> bool:
    return len(text) <= WINDOW and len(tokenizer.spans(text)) <= room


def _cut(text: str, start: int, stop: int, tokenizer: Tokenizer, room: int) -> Iterator[tuple[int, int]]:
    while start < stop:
        window = text[start : min(stop, start + WINDOW)]
        spans = tokenizer.spans(window)
        if len(spans) > room:
            end = start + _best_cut(window, spans, room)
        elif start + len(window) < stop:
            # The window ends before the paragraph does: end this piece at its last white space, if it has
            # any.
            end = start + (_last_space(window) or len(window))
        else:
            end = stop
        piece = _stripped(text, start, end)
        if piece[0] < piece[1]:
            yield piece
        start = end


def _best_cut(window: str, spans: Sequence[TokenSpan], room: int) -> int:
    # The later half of the tokens that fit, so that no piece comes out tiny. A cut inside a word is the last
    # resort: its second half would be tokenized into other pieces.
    candidates = [i for i in range(room, room // 2, -1) if spans[i].word != spans[i - 1].word]
    gaps = [(spans[i - 1].stop - 1, spans[i].start) for i in candidates]
    for first, cut in gaps:
        if SENTENCE_END.search(window[first : cut + 1]):
            return cut
    for first, cut in gaps:
        if cut - first > 1:
            return cut
    return gaps[0][1] if gaps else spans[room].start


def _last_space(window: str) -> int:
    match = re.search(r"\s\S*\Z", window)
    return match.start() if match else 0


def _stripped(text: str, start: int, stop: int) -> tuple[int, int]:
    piece = text[start:stop]
    return start + len(piece) - len(piece.lstrip()), start + len(piece.rstrip())
