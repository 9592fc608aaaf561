"""PageMap: which pages of a cache are used, shared and cached, small enough to be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["PageMap", "page_map"]

_MOST_CELLS = 1024


class PageMap(NamedTuple):
    """The pages of a cache as cells, in order. All pages that no field counts are free.

    per_cell: how many pages a cell stands for. The last cell may have fewer.
    used, shared, kept: a digit for each cell, from "0" for none of its pages to "9" for all; at least "1" for any.
    used: pages that one sequence reads.
    shared: pages that several sequences read.
    kept: cached pages: no sequence reads them, but the index of prefixes has them.
    """

    per_cell: int
    used: str
    shared: str
    kept: str


def page_map(references: Sequence[int], indexed: Sequence[bool], most_cells: int = _MOST_CELLS) -> PageMap:
    """The map of a pool.

    references: of each page. indexed: whether the index of prefixes has the page. most_cells: of the map, at most.
    """
    counts, in_index = np.array(references, np.int64), np.array(indexed, bool)
    per_cell = max(1, -(-len(counts) // most_cells))
    kinds = (counts == 1, counts > 1, (counts == 0) & in_index)
    return PageMap(per_cell, *(_digits(kind, per_cell) for kind in kinds))


def _digits(pages: NDArray[np.bool_], per_cell: int) -> str:
    starts = np.arange(0, len(pages), per_cell)
    if not len(starts):
        return ""
    counts = np.add.reduceat(pages.astype(np.int64), starts)
    sizes = np.minimum(per_cell, len(pages) - starts)
    # A single page of a large cell still shows, and a cell counts as full only when it is.
    tenths = np.where(counts == sizes, 9, np.clip(counts * 9 // sizes, (counts > 0).astype(np.int64), 8))
    return "".join(map(str, tenths.tolist()))
