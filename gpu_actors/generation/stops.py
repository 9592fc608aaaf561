"""StopStrings: ends a text at the first of some strings, which may span several pieces of the text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Takes a text in pieces and returns it up to the first complete stop string, which is left out.

    found: whether there was a stop string.
    Text that may begin a stop string is held back until more text decides it. If two stop strings are complete at the
    same character, the longer one counts. Pieces that are not shown, such as special tokens, may be a part of a stop
    string and are not returned.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self.found = False
        self._stops = tuple(stops)
        self._held = ""
        self._hidden: list[tuple[int, int]] = []  # ranges of the held text that are not shown

    def feed(self, piece: str, *, shown: bool = True) -> str:
        """Add a piece. Returns the text that can no longer begin a stop string. Empty after a stop string."""
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
        count = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - count :]
        return self._shown(text[: len(text) - count])

    def end(self) -> str:
        """End the text, which had no stop string. Returns what was held back."""
        text, self._held = self._held, ""
        return self._shown(text)

    def _shown(self, text: str) -> str:
        """``text``, the beginning of the held text, without the ranges that are not shown."""
        visible, at, end = "", 0, len(text)
        for start, stop in self._hidden:
            visible += text[at:start]
            at = stop
        self._hidden = [(max(start - end, 0), stop - end) for start, stop in self._hidden if stop > end]
        return visible + text[at:]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of the text that is a prefix of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
