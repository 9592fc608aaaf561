"""PageMap: which pages of a cache are used, shared and kept, small enough to be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["PageMap", "page_map"]

_MOST_CELLS = 1024


class PageMap(NamedTuple):
    """The pages of a cache as cells in their order. per_cell: pages that a cell stands for, the last one fewer.

    used, shared, kept: a digit a cell, "0" for none of its pages to "9" for all of them, and "1" where there is one at
    least. used: pages that one sequence reads. shared: that several read. kept: that none reads, but whose prefix is
    remembered. All others are free.
    """

    per_cell: int
    used: str
    shared: str
    kept: str


def page_map(references: Sequence[int], remembered: Sequence[bool], most_cells: int = _MOST_CELLS) -> PageMap:
    """The map of a pool with these references of each page. most_cells: at most so many cells."""
    counts, known = np.array(references, np.int64), np.array(remembered, bool)
    per_cell = max(1, -(-len(counts) // most_cells))
    kinds = (counts == 1, counts > 1, (counts == 0) & known)
    return PageMap(per_cell, *(_digits(kind, per_cell) for kind in kinds))


def _digits(pages: NDArray[np.bool_], per_cell: int) -> str:
    starts = np.arange(0, len(pages), per_cell)
    if not len(starts):
        return ""
    held = np.add.reduceat(pages.astype(np.int64), starts)
    sizes = np.minimum(per_cell, len(pages) - starts)
    # A single page of a large cell still shows, and a cell counts as full only when it is.
    tenths = np.where(held == sizes, 9, np.clip(held * 9 // sizes, (held > 0).astype(np.int64), 8))
    return "".join(map(str, tenths.tolist()))
