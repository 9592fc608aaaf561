"""Text files to passages that fit the model, with nothing lost.

Under a Markdown heading, a passage is as many paragraphs as fit, and all but the first are embedded with the heading
above them. Elsewhere it is a paragraph, joined to the next where it is very short. A paragraph that is too long is cut
at the end of a sentence or line, else between words.
"""

from __future__ import annotations

import math
import os
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpu_actors.embedding.sections import Section, sections_of
from gpu_actors.embedding.tokens import Tokenizer, TokenSpan
from gpu_actors.errors import InvalidRequest

__all__ = ["Passage", "Piece", "passages_of", "read_passages", "read_text", "split_passages"]

PARAGRAPH = re.compile(r"\S[^\n]*(?:\n[^\S\n]*\S[^\n]*)*")
SENTENCE_END = re.compile(r"[.!?:;][\"')\]]*\s|\n")
SPECIAL_TOKENS = 2
HEADING_TOKENS = 16
"""Paragraphs below this many tokens are joined to the next, for a bare heading would outrank the text below it. Longer
headings are not repeated.
"""
MAX_FILE_BYTES = 64 << 20
"""More text than this takes hours to embed without a GPU, and its vectors much memory."""
WINDOW = 2048
"""Characters tokenized to find one cut; 254 tokens of prose are some 1,200."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a file. line: where it starts, from 1. The text is the file's own, stripped at its ends.

    heading: of its section, "" where the text begins with it or there is none.
    """

    file: str
    line: int
    text: str
    heading: str = ""

    @property
    def embedded(self) -> str:
        """What is embedded: a paragraph alone may not say what it is about."""
        return f"{self.heading}\n\n{self.text}" if self.heading else self.text


def read_passages(file: str, tokenizer: Tokenizer) -> list[Passage]:
    """The passages of a UTF-8 text file ("-": standard input). Raises `InvalidRequest` naming the file."""
    return passages_of(file, read_text(file), tokenizer)


def passages_of(file: str, text: str, tokenizer: Tokenizer) -> list[Passage]:
    """The passages of a text that was read from ``file``."""
    passages: list[Passage] = []
    line, counted = 1, 0
    for start, stop, heading in split_passages(text, tokenizer):
        line += text.count("\n", counted, start)
        counted = start
        passages.append(Passage(file, line, text[start:stop], heading))
    return passages


def read_text(file: str) -> str:
    """The contents of a UTF-8 text file ("-": standard input), at most `MAX_FILE_BYTES`.

    Raises `InvalidRequest` where there is no text.
    """
    try:
        data = _read(file)
    except FileNotFoundError:
        raise InvalidRequest("file", file, "does not exist") from None
    except IsADirectoryError:
        raise InvalidRequest("file", file, "is a folder; name the text files in it") from None
    except OSError as error:
        raise InvalidRequest("file", file, f"cannot be read: {error.strerror or error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequest("file", file, f"is larger than {MAX_FILE_BYTES >> 20} MiB; split it")
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


def _read(file: str) -> bytes:
    """A file's bytes, one more than `MAX_FILE_BYTES` at most. Raises OSError, or `InvalidRequest` for a device."""
    if file == "-":
        return sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    # A pipe that has no writer would keep a blocking open waiting for ever.
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise InvalidRequest("file", file, "is a device or a pipe; name - and hand it to standard input")
        return opened.read(MAX_FILE_BYTES + 1)


class Piece(NamedTuple):
    """Characters [start, stop) of a text. heading: of their section, "" where they begin with it or there is none."""

    start: int
    stop: int
    heading: str


def split_passages(text: str, tokenizer: Tokenizer) -> Iterator[Piece]:
    """The passages of a text, in order, each with its heading of at most ``max_tokens`` tokens.

    Only white space lies between them.
    """
    room = max(1, tokenizer.max_tokens - SPECIAL_TOKENS - len(tokenizer.spans(tokenizer.prompt)))
    for section in sections_of(text):
        size = _size(section.heading, tokenizer)
        heading = section.heading if size <= min(HEADING_TOKENS, room // 2) else ""
        spare = room - int(size) if heading else room
        for start, stop in _split(text, section, tokenizer, room, spare):
            yield Piece(start, stop, heading if start > section.start else "")


def _split(text: str, section: Section, tokenizer: Tokenizer, room: int, spare: int) -> Iterator[tuple[int, int]]:
    """The passages of a section. room: tokens that its first may have. spare: tokens of those after it."""
    begun: int | None = None
    end, used = 0, 0.0
    for match in PARAGRAPH.finditer(text, section.start, section.stop):
        start, stop = match.span()
        size = _size(match[0], tokenizer)
        if begun is not None:
            limit = room if begun == section.start else spare
            short = used < HEADING_TOKENS
            if (short or section.heading) and used + size <= limit and stop - begun <= WINDOW:
                end, used = stop, used + size
                continue
            if not short or size <= spare:
                yield _stripped(text, begun, end)
                begun = None
        begun = start if begun is None else begun
        if size > spare:
            yield from _cut(text, begun, stop, tokenizer, spare)
            begun = None
        else:
            end, used = stop, size
    if begun is not None:
        yield _stripped(text, begun, end)


def _size(text: str, tokenizer: Tokenizer) -> float:
    """Tokens of a text. Sizes of texts with white space between them add up."""
    return len(tokenizer.spans(text)) if len(text) <= WINDOW else math.inf


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
