"""Batch: which rows of which texts the next step computes.

Texts come and go between steps. A text that generates brings its last token. A new text brings as much of its prompt as
the step has room for, so a long prompt does not delay the others:

    step 1   a a a a a a . .      a's prompt
    step 2   a b b b b b b b      a's next token, the beginning of b's prompt
    step 3   a b b c c c . .      the rest of it; c's prompt

Most of that room goes to the prompts of which the least is left, and a share of it to those that came first, so that
short ones do not wait for long ones, and long ones go on in every step.

A text that waits for pages lets others pass that end before it could begin, or that take no page of it: batch systems
call this backfilling (Lifka, "The ANL/IBM SP scheduling system", 1995).
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

_FIRST_COME = 4
"""One row of so many that prompts get in a step goes to those that came first."""

_LOOKED_AT = 256
"""Texts that wait which are looked at in a turn, whether they may pass the first."""


@dataclass(slots=True, eq=False)
class Text:
    """One text on its way. tokens: the prompt and the generated ones. computed: how many of them are computed.

    pages: set aside for it until it ends. new: tokens that it may get, all in all. cached: how many it began with,
    because other texts had computed them. sequences: in the cache, one a layer; empty until it runs.
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
        """Steps that it still takes at most, if it gets so many rows of them."""
        return -(-(len(self.tokens) - self.computed - 1) // rows) + self._longest - len(self.tokens)


class Rows(NamedTuple):
    """The rows of a step, text after text. counts: of each text; the last row of those that are up to date gives their
    next token.
    """

    texts: tuple[Text, ...]
    tokens: NDArray[np.int64]
    counts: tuple[int, ...]

    @property
    def ends(self) -> NDArray[np.int32]:
        """int32 (texts + 1,), as cu_seqlens."""
        return np.cumsum([0, *self.counts], dtype=np.int32)

    @property
    def finished(self) -> list[int]:
        """The texts, by number, that have no token left to compute after this step."""
        counts = zip(self.texts, self.counts, strict=True)
        return [index for index, (text, count) in enumerate(counts) if text.computed + count == len(text.tokens)]


class Batcher:
    """Texts that run and texts that wait. rows: at most in a step. pages: that may be set aside for all that run.

    A text is let in when pages for its whole length are free, so no text is ever put back.
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
        """Texts that have their pages."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Texts that are not let in yet."""
        return len(self._waiting)

    def add(self, text: Text) -> None:
        """Let a text wait. Its pages must be no more than there are in all."""
        self._waiting.append(text)

    def admit(self) -> list[Text]:
        """The texts that run from now on, in the order in which they begin."""
        admitted = []
        while (text := self._next()) is not None:
            self._waiting.remove(text)
            self._free -= text.pages
            self._running.append(text)
            admitted.append(text)
        return admitted

    def _next(self) -> Text | None:
        """The first that waits, or while it has no room one that does not keep it waiting."""
        if not self._waiting or len(self._running) >= self._rows:
            return None
        first = self._waiting[0]
        if first.pages <= self._free:
            return first
        # When there will be pages for the first, and how many beside them.
        spare, until = self._free - first.pages, 0
        for text in sorted(self._running, key=lambda text: text.steps(self._rows)):
            spare, until = spare + text.pages, text.steps(self._rows)
            if spare >= 0:
                break
        for text in islice(self._waiting, 1, _LOOKED_AT):
            if text.pages <= self._free and (text.pages <= spare or text.steps(self._rows) <= until):
                return text
        return None

    def cancelled(self) -> list[Text]:
        """The texts that are cancelled and not removed yet."""
        return [text for text in (*self._running, *self._waiting) if text.cancelled]

    def remove(self, texts: Iterable[Text]) -> None:
        """Forget texts that have ended; their pages are free again."""
        for text in texts:
            if text in self._running:
                self._running.remove(text)
                self._free += text.pages
            elif text in self._waiting:
                self._waiting.remove(text)

    def next_rows(self) -> Rows | None:
        """The next step's rows, or None where nothing runs."""
        if not self._running:
            return None
        # One row each first, so that every text that generates goes on in every step.
        counts = dict.fromkeys(self._running, 1)
        room = self._rows - len(self._running)
        prompts = [text for text in self._running if text.computed + 1 < len(text.tokens)]
        room -= _give(counts, sorted(prompts, key=_left), room - room // _FIRST_COME)
        _give(counts, prompts, room)
        tokens: list[int] = []
        for text, count in counts.items():
            tokens += text.tokens[text.computed : text.computed + count]
        return Rows(tuple(self._running), np.array(tokens), tuple(counts.values()))


def _left(text: Text) -> int:
    return len(text.tokens) - text.computed


def _give(counts: dict[Text, int], prompts: Sequence[Text], rows: int) -> int:
    """Give rows to prompts, in this order. Returns how many they took."""
    left = rows
    for text in prompts:
        more = min(left, _left(text) - counts[text])
        counts[text] += more
        left -= more
    return rows - left
