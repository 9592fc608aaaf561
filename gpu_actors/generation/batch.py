"""Batch: which rows of which texts the next step computes.

Texts join and leave between steps. A text that generates adds its last token. A new text adds as much of its prompt as
the step has room for, so a long prompt does not delay the others:

    step 1   a a a a a a . .      a's prompt
    step 2   a b b b b b b b      a's next token, the beginning of b's prompt
    step 3   a b b c c c . .      the rest of it; c's prompt

Most of that room goes to the prompts with the fewest tokens left, and a share of it to the oldest ones, so that short
prompts do not wait for long ones, and long ones progress in every step.

While the first waiting text lacks pages, another text may start before it if it ends before the first could begin, or
if it takes pages that the first does not need. Batch systems call this backfilling (Lifka, "The ANL/IBM SP scheduling
system", 1995).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Batcher", "Rows", "Text"]

_FIFO_SHARE = 4
"""One in this many of a step's rows for prompts goes to the oldest prompts."""

_BACKFILL_WINDOW = 256
"""How many waiting texts are considered for backfilling."""


@dataclass(slots=True, eq=False)
class Text:
    """One text that waits or runs.

    tokens: the prompt and the generated ones.
    pages: reserved for it until it ends.
    new: how many tokens it may generate.
    computed: how many of its tokens are computed.
    cached: how many of its tokens other texts had computed when it began.
    sequences: in the cache, one for each layer. Empty until it runs.
    """

    tokens: list[int]
    pages: int
    new: int = 1
    computed: int = 0
    cached: int = 0
    cancelled: bool = False
    sequences: list[Any] = field(default_factory=list)
    _longest: int = field(init=False)

    def __post_init__(self) -> None:
        self._longest = len(self.tokens) + self.new

    def steps(self, rows: int) -> int:
        """How many steps the text still takes at most, if each computes up to ``rows`` of its rows."""
        return -(-(len(self.tokens) - self.computed - 1) // rows) + self._longest - len(self.tokens)


class Rows(NamedTuple):
    """The rows of a step, text after text.

    counts: how many rows each text has. The last row of a text whose tokens are all computed gives its next token.
    """

    texts: tuple[Text, ...]
    tokens: NDArray[np.int64]
    counts: tuple[int, ...]

    @property
    def ends(self) -> NDArray[np.int32]:
        """The bounds of the texts' rows as cu_seqlens, int32 (texts + 1,)."""
        return np.cumsum([0, *self.counts], dtype=np.int32)

    @property
    def finished(self) -> list[int]:
        """The indices of the texts whose tokens are all computed after this step."""
        counts = zip(self.texts, self.counts, strict=True)
        return [index for index, (text, count) in enumerate(counts) if text.computed + count == len(text.tokens)]


class Batcher:
    """Texts that run and texts that wait.

    rows: the most rows of a step.
    pages: how many may be reserved for all running texts.

    A text is admitted when pages for its whole length are free, so no text is ever preempted.
    """

    def __init__(self, rows: int, pages: int) -> None:
        self._rows = rows
        self._free = pages
        self._waiting: deque[Text] = deque()
        self._running: list[Text] = []

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def add(self, text: Text) -> None:
        """Queue a text. It must not need more pages than there are in all."""
        self._waiting.append(text)

    def admit(self) -> list[Text]:
        """Admit texts. Returns them in the order in which they begin."""
        admitted = []
        while (text := self._next()) is not None:
            self._waiting.remove(text)
            self._free -= text.pages
            self._running.append(text)
            admitted.append(text)
        return admitted

    def _next(self) -> Text | None:
        """The first waiting text, or if there is no room for it, another text that does not delay it."""
        if not self._waiting or len(self._running) >= self._rows:
            return None
        first = self._waiting[0]
        if first.pages <= self._free:
            return first
        # When the first text will have its pages, and how many pages are spare then.
        spare, until = self._free - first.pages, 0
        for text in sorted(self._running, key=lambda text: text.steps(self._rows)):
            spare, until = spare + text.pages, text.steps(self._rows)
            if spare >= 0:
                break
        for text in islice(self._waiting, 1, _BACKFILL_WINDOW):
            if text.pages <= self._free and (text.pages <= spare or text.steps(self._rows) <= until):
                return text
        return None

    def cancelled(self) -> list[Text]:
        return [text for text in (*self._running, *self._waiting) if text.cancelled]

    def remove(self, texts: Iterable[Text]) -> None:
        for text in texts:
            if text in self._running:
                self._running.remove(text)
                self._free += text.pages
            elif text in self._waiting:
                self._waiting.remove(text)

    def next_rows(self) -> Rows | None:
        """The next step's rows, or None if no text runs."""
        if not self._running:
            return None
        # Each text gets one row first, so that every text that generates progresses in every step.
        counts = dict.fromkeys(self._running, 1)
        room = self._rows - len(self._running)
        prompts = [text for text in self._running if text.computed + 1 < len(text.tokens)]
        room -= _give(counts, sorted(prompts, key=_tokens_left), room - room // _FIFO_SHARE)
        _give(counts, prompts, room)
        tokens: list[int] = []
        for text, count in counts.items():
            tokens += text.tokens[text.computed : text.computed + count]
        return Rows(tuple(self._running), np.array(tokens), tuple(counts.values()))


def _tokens_left(text: Text) -> int:
    return len(text.tokens) - text.computed


def _give(counts: dict[Text, int], prompts: Sequence[Text], rows: int) -> int:
    """Give rows to prompts, in this order. Returns how many rows were given."""
    remaining = rows
    for text in prompts:
        more = min(remaining, _tokens_left(text) - counts[text])
        counts[text] += more
        remaining -= more
    return rows - remaining
