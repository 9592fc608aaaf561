"""EngineMeter: how long texts wait and how large steps are."""

from __future__ import annotations

from gpu_actors.runtime.meter import SECONDS, Histogram

__all__ = ["EngineMeter"]

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class EngineMeter:
    """Histograms of one engine, for the thread of its loop.

    queue: seconds from when a text was asked for until it is let in. first: until its first token. between: seconds
    between two of its tokens. rows, texts: of a step.
    """

    def __init__(self) -> None:
        self.queue: Histogram = Histogram(SECONDS)
        self.first: Histogram = Histogram(SECONDS)
        self.between: Histogram = Histogram(SECONDS)
        self.rows: Histogram = Histogram(_SIZES)
        self.texts: Histogram = Histogram(_SIZES)
