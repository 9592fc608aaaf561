"""StopStrings: ends a text at the first of some strings, wherever the pieces of the text are cut."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Takes a text in pieces and gives it on up to the stop string that is complete first, which is left out.

    found: whether one has been met. What may be the beginning of a stop string is held back until it is clear. Where
    two are complete at the same character, the longer one counts. Pieces that are not shown, such as special tokens,
    may be a part of a stop string and are not given on.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.found = False
        self._stops = tuple(stops)
        self._held = ""
        self._hidden: list[tuple[int, int]] = []  # where of what is held

    def feed(self, piece: str, *, shown: bool = True) -> str:
        """The text that this piece makes certain. Empty once a stop string has been met."""
        if self.found:
            return ""
        text = self._held + piece
        if not shown:
            self._hidden.append((len(self._held), len(text)))
        starts = ((text.find(stop), stop) for stop in self._stops)
        ends = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if ends:
            self.found, self._held = True, ""
            return self._shown(text[: min(ends)[1]])
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return self._shown(text[: len(text) - held])

    def end(self) -> str:
        """What was held back. The text has ended without a stop string."""
        held, self._held = self._held, ""
        return self._shown(held)

    def _shown(self, text: str) -> str:
        """The beginning of what was held, without what is not shown."""
        kept, at, end = "", 0, len(text)
        for start, stop in self._hidden:
            kept += text[at:start]
            at = stop
        self._hidden = [(max(start - end, 0), stop - end) for start, stop in self._hidden if stop > end]
        return kept + text[at:]


def _overlap(text: str, stop: str) -> int:
    """Characters of the longest end of the text that begins the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
