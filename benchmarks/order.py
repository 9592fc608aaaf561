"""The order in which a kernel's blocks start if its tiles differ in work: kernels_cu/common/block_order.cuh."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["SECTION_BLOCKS", "ranked", "section_size"]

SECTION_BLOCKS = 512


def section_size(ranks: int, group: int) -> int:
    """Heads of a section. ranks: tiles of a head. group: heads that share keys and values."""
    return -(-SECTION_BLOCKS // ranks // group) * group


def ranked(heads: int, ranks: int, section: int, shortened: bool = False) -> Iterator[tuple[int, int]]:
    """(head, rank) of each block: rank by rank within a section of heads, one section after another.

    The last section also takes the heads that are left over. If ``shortened``, they form a section of their own.
    """
    section = min(heads, section)
    for first in range(0, heads, section):
        last = heads - first < 2 * section and not shortened
        size = heads - first if last else min(section, heads - first)
        for rank in range(ranks):
            for head in range(first, first + size):
                yield head, rank
        if last:
            return
