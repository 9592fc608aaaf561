"""EngineMeter: how long texts wait and how large steps are."""

from __future__ import annotations

from gpu_actors.runtime.meter import SECONDS, Histogram

__all__ = ["EngineMeter"]

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_WEIGHT = 0.02


class EngineMeter:
    """Histograms of one engine. The thread of its loop fills them.

    queue: seconds from a text's request to its admission.
    first: seconds from a text's request to its first token.
    between: seconds between two of its tokens.
    rows, texts: of a step.
    row_share: the share by which one more row makes a step longer, as measured. It is the cost of a prompt's row
        relative to a generated token, which takes a step.
    """

    def __init__(self) -> None:
        self.queue: Histogram = Histogram(SECONDS)
        self.first: Histogram = Histogram(SECONDS)
        self.between: Histogram = Histogram(SECONDS)
        self.rows: Histogram = Histogram(_SIZES)
        self.texts: Histogram = Histogram(_SIZES)
        self.row_share: float = 1 / 16
        self._rows = self._seconds = self._spread = self._slope = 0.0

    def step(self, rows: int, texts: int, seconds: float) -> None:
        self.rows.observe(rows)
        self.texts.observe(texts)
        if not self._seconds:
            self._rows, self._seconds = rows, seconds
            return
        # The slope of a line through the last steps. Older steps count less.
        more, longer = rows - self._rows, seconds - self._seconds
        self._rows += _WEIGHT * more
        self._seconds += _WEIGHT * longer
        self._spread += _WEIGHT * (more * more - self._spread)
        self._slope += _WEIGHT * (more * longer - self._slope)
        if self._spread:
            self.row_share = min(1.0, max(1e-3, self._slope / self._spread / self._seconds))
