"""Splits text files into passages that fit the model, without losing text, and ranks them.

Under a Markdown heading, a passage has as many paragraphs as fit. All passages but the first are embedded with their
heading. Elsewhere a passage is one paragraph, joined to the next if it is very short. A paragraph that is too long is
cut at the end of a sentence or line, else between words.
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

import numpy as np
from numpy.typing import NDArray

from gpu_actors.embedding.tokens import Tokenizer, TokenSpan
from gpu_actors.errors import InvalidRequest
from gpu_actors.fields import integer

__all__ = ["Hit", "Passage", "Piece", "passages_of", "rank", "read_passages", "read_text", "split_passages"]

_HEADING = re.compile(r"^(?:[^\S\n]*(?P<fence>```|~~~)|#{1,6}[^\S\n]+(?P<title>\S[^\n]*))", re.M)
PARAGRAPH = re.compile(r"\S[^\n]*(?:\n[^\S\n]*\S[^\n]*)*")
SENTENCE_END = re.compile(r"[.!?:;][\"')\]]*\s|\n")
SPECIAL_TOKENS = 2
HEADING_TOKENS = 16
"""Paragraphs of fewer tokens are joined to the next, because a lone heading would rank above the text below it. Longer
headings are not repeated.
"""
MAX_FILE_BYTES = 64 << 20
"""The largest file. More text takes hours to embed without a GPU, and its vectors need much memory."""
WINDOW = 2048
"""Characters tokenized to find one cut; 254 tokens of prose have about 1,200."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a file.

    line: the line where it starts, from 1.
    text: as in the file, stripped at both ends.
    heading: the heading of its section, "" if the text begins with it or there is none.
    """

    file: str
    line: int
    text: str
    heading: str = ""

    @property
    def embedded(self) -> str:
        """The text to embed. It includes the heading, because a paragraph may not name its topic."""
        return f"{self.heading}\n\n{self.text}" if self.heading else self.text


def read_passages(file: str, tokenizer: Tokenizer) -> list[Passage]:
    """The passages of a UTF-8 text file ("-": standard input). Raises `InvalidRequest` with the file's name."""
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

    Raises `InvalidRequest` if there is no such text.
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
    """A file's bytes, at most one more than `MAX_FILE_BYTES`. Raises OSError, or `InvalidRequest` for a device."""
    if file == "-":
        return sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    # A blocking open of a pipe without a writer would wait forever.
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise InvalidRequest("file", file, "is a device or a pipe; name - and hand it to standard input")
        return opened.read(MAX_FILE_BYTES + 1)


class Piece(NamedTuple):
    """Characters [start, stop) of a text. heading: their section's, "" if they begin with it or there is none."""

    start: int
    stop: int
    heading: str


def _sections(text: str) -> Iterator[Piece]:
    """The sections of a text with their titles, in order and without gaps. A line of a code block is not a heading."""
    start, heading, fence = 0, "", ""
    for line in _HEADING.finditer(text):
        marker = line["fence"]
        if marker:
            fence = marker if not fence else "" if marker == fence else fence
        elif not fence:
            yield Piece(start, line.start(), heading)
            start, heading = line.start(), line["title"].rstrip().rstrip("#").rstrip()
    yield Piece(start, len(text), heading)


def split_passages(text: str, tokenizer: Tokenizer) -> Iterator[Piece]:
    """The passages of a text, in order. Each has at most ``max_tokens`` tokens, its heading included.

    Only white space lies between passages.
    """
    room = max(1, tokenizer.max_tokens - SPECIAL_TOKENS - len(tokenizer.spans(tokenizer.prompt)))
    for section in _sections(text):
        size = _size(section.heading, tokenizer)
        heading = section.heading if size <= min(HEADING_TOKENS, room // 2) else ""
        spare = room - int(size) if heading else room
        for start, stop in _split(text, section, tokenizer, room, spare):
            yield Piece(start, stop, heading if start > section.start else "")


def _split(text: str, section: Piece, tokenizer: Tokenizer, room: int, later_room: int) -> Iterator[tuple[int, int]]:
    """The passages of a section. room: the most tokens of the first passage. later_room: of each other one."""
    begin: int | None = None
    end, used = 0, 0.0
    for match in PARAGRAPH.finditer(text, section.start, section.stop):
        start, stop = match.span()
        size = _size(match[0], tokenizer)
        if begin is not None:
            limit = room if begin == section.start else later_room
            short = used < HEADING_TOKENS
            if (short or section.heading) and used + size <= limit and stop - begin <= WINDOW:
                end, used = stop, used + size
                continue
            if not short or size <= later_room:
                yield _stripped(text, begin, end)
                begin = None
        begin = start if begin is None else begin
        if size > later_room:
            yield from _cut(text, begin, stop, tokenizer, later_room)
            begin = None
        else:
            end, used = stop, size
    if begin is not None:
        yield _stripped(text, begin, end)


def _size(text: str, tokenizer: Tokenizer) -> float:
    """The number of a text's tokens. Sizes of texts that white space separates add up."""
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
    # Cuts lie in the later half of the tokens that fit, so that no piece is tiny. A cut inside a word is the last
    # resort: the second half of the word would be tokenized differently.
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


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage's row and its cosine with the query, in [-1, 1]."""

    index: int
    score: float


def rank(query: NDArray[np.float32], passages: NDArray[np.float32], top: int) -> list[Hit]:
    """The ``top`` best passages, best first. Passages with equal scores keep their order.

    query: (dim,) and passages: (n, dim), of any length. Raises `InvalidRequest` unless top >= 1.
    """
    integer("top", top, 1)
    lengths = np.linalg.norm(passages, axis=1) * np.linalg.norm(query)
    scores = np.clip(passages @ query / np.maximum(lengths, np.float32(1e-12)), -1.0, 1.0)
    order = np.argsort(-scores, kind="stable")[:top]
    return [Hit(int(index), float(scores[index])) for index in order]
