"""Which neighbours of a batch begin with the same pages, from their block table on the host.

sequence 0   7 3 9 | 4          ends   0 2 3 5        group 0 shares pages 7 3 9, group 1 is one sequence alone,
sequence 1   7 3 9 | 8 2        pages  3 0 1          group 2 shares page 5
sequence 2   6
sequence 3   5 | 1
sequence 4   5 | 0
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["SharedPrefixes", "shared_prefixes"]

_DEEPEST = 64  # nested cuts, after which a run stays whole


class SharedPrefixes(NamedTuple):
    """A batch as groups of neighbours. Group g has sequences ``ends[g]`` to ``ends[g + 1]``.

    ends: int64 (groups + 1,).
    pages: int64 (groups,), how many first pages the whole group shares; 0 for a single sequence.
    """

    ends: npt.NDArray[np.int64]
    pages: npt.NDArray[np.int64]


def shared_prefixes(table: Any, most: Any) -> SharedPrefixes | None:
    """The groups of a batch that save the most pages, or None if no neighbours begin with the same page.

    table: int32 (batch, columns), the pages of each sequence. most: (batch,), how many pages of each may be shared.
    """
    shared = np.minimum(most[1:], most[:-1])
    alike = np.flatnonzero((shared > 0) & (table[1:, 0] == table[:-1, 0]))
    if not alike.size:
        return None
    common = np.zeros(len(table) - 1, np.int64)
    differ = table[alike + 1] != table[alike]
    common[alike] = np.minimum(shared[alike], np.where(differ.any(axis=1), differ.argmax(axis=1), table.shape[1]))
    bounds = [0, *(np.flatnonzero(common == 0) + 1).tolist(), len(table)]
    groups: list[tuple[int, int]] = []
    for first, end in itertools.pairwise(bounds):
        groups += _groups(common[first : end - 1], end, 0)[1]
    ends, pages = zip(*groups, strict=True)
    return SharedPrefixes(np.array([0, *ends], np.int64), np.array(pages, np.int64))


def _groups(common: npt.NDArray[np.int64], end: int, depth: int) -> tuple[int, list[tuple[int, int]]]:
    """The pages that a run saves, and its groups as (end, pages). common: how many pages each two neighbours share.

    A run is cut at its shortest common prefix if its parts save more than the whole.
    """
    if not common.size:
        return 0, [(end, 0)]
    least = int(common.min())
    whole = least * common.size, [(end, least)]
    if depth == _DEEPEST or least == int(common.max()):
        return whole
    cut = int(common.argmin())
    left = _groups(common[:cut], end - (common.size - cut), depth + 1)
    right = _groups(common[cut + 1 :], end, depth + 1)
    return max(whole, (left[0] + right[0], left[1] + right[1]), key=lambda saving: saving[0])
