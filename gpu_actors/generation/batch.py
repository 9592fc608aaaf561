"""Batch: which rows of which texts the next step computes.

Texts come and go between steps. A text that generates brings its last token. A new text brings as much of its prompt as
the step has room for, so a long prompt does not delay the others:

    step 1   a a a a a a . .      a's prompt
    step 2   a b b b b b b b      a's next token, the beginning of b's prompt
    step 3   a b b c c c . .      the rest of it; c's prompt
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Batcher", "Rows", "Text"]


@dataclass(slots=True, eq=False)
class Text:
    """One text on its way. tokens: the prompt and the generated ones. computed: how many of them are computed.

    pages: set aside for it until it ends. cached: how many it began with, because other texts had computed them.
    sequences: in the cache, one a layer; empty until it runs.
    """

    tokens: list[int]
    pages: int
    computed: int = 0
    cached: int = 0
    cancelled: bool = False
    sequences: list[Any] = field(default_factory=list)


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
        """The texts that run from now on, in the order in which they came."""
        admitted = []
        # No text overtakes another: a long one would wait for as long as short ones come.
        while self._waiting and self._waiting[0].pages <= self._free and len(self._running) < self._rows:
            text = self._waiting.popleft()
            self._free -= text.pages
            self._running.append(text)
            admitted.append(text)
        return admitted

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
        room = self._rows - len(self._running)
        tokens: list[int] = []
        counts: list[int] = []
        for text in self._running:
            more = min(room, len(text.tokens) - text.computed - 1)
            room -= more
            counts.append(1 + more)
            tokens += text.tokens[text.computed : text.computed + 1 + more]
        return Rows(tuple(self._running), np.array(tokens), tuple(counts))
