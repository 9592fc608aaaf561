"""StopStrings: ends a text at the first of some strings, wherever the pieces of the text are cut."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Takes a text in pieces and gives it on up to the stop string that is complete first, which is left out.

    found: whether one has been met. What may be the beginning of a stop string is held back until it is clear. Where
    two are complete at the same character, the longer one counts.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.found = False
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, piece: str) -> str:
        """The text that this piece makes certain. Empty once a stop string has been met."""
        if self.found:
            return ""
        text = self._held + piece
        starts = ((text.find(stop), stop) for stop in self._stops)
        ends = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def end(self) -> str:
        """What was held back. The text has ended without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Characters of the longest end of the text that begins the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
