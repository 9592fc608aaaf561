"""PagePool: which pages of a KV cache are free, and how many references each of the others has.

A page is free, referenced (by tables of sequences, and by writes that may have to be undone), or kept. A kept page has
no reference, but the index of prefixes knows its content, so the next sequence with that prefix can begin with it. Kept
pages count as free: when the free ones run out, the pool gives them up, oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from gpu_actors.errors import CacheFull

__all__ = ["PagePool"]


class PagePool:
    """Pages 0 to blocks - 1. Every operation takes constant time a page.

    on_evict: called with a kept page that is being given up.
    """

    def __init__(self, blocks: int, on_evict: Callable[[int], None]) -> None:
        self.blocks = blocks
        self._on_evict = on_evict
        self._free = list(range(blocks - 1, -1, -1))
        self._references = [0] * blocks
        self._remembered = [False] * blocks
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._shared = 0

    @property
    def free_blocks(self) -> int:
        """Pages that `take` could give out, kept ones among them."""
        return len(self._free) + len(self._kept)

    @property
    def kept_blocks(self) -> int:
        """Pages without a reference whose prefix is remembered."""
        return len(self._kept)

    @property
    def shared_blocks(self) -> int:
        """Pages with more than one reference."""
        return self._shared

    def look(self) -> tuple[list[int], list[bool]]:
        """Of each page: its references, and whether its prefix is remembered."""
        return list(self._references), list(self._remembered)

    def references(self, page: int) -> int:
        return self._references[page]

    def writable(self, page: int) -> bool:
        """Whether a row can be written to the page: it has one reference, and its content has no name."""
        return self._references[page] == 1 and not self._remembered[page]

    def take(self, count: int) -> list[int]:
        """Take ``count`` pages, each with one reference. Raises `CacheFull`, and then none is taken."""
        if count > self.free_blocks:
            raise CacheFull(f"{count} pages are needed, and {self.free_blocks} of {self.blocks} are free")
        while len(self._free) < count:
            page, _ = self._kept.popitem(last=False)
            self._remembered[page] = False
            self._on_evict(page)
            self._free.append(page)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, page: int) -> None:
        """Add a reference to a page that is referenced or kept."""
        count = self._references[page]
        if count == 0:
            del self._kept[page]
        elif count == 1:
            self._shared += 1
        self._references[page] = count + 1

    def release(self, page: int) -> None:
        """Remove a reference. Without the last one the page is free, or kept if its prefix is remembered."""
        count = self._references[page] - 1
        self._references[page] = count
        if count == 1:
            self._shared -= 1
        elif count == 0:
            if self._remembered[page]:
                self._kept[page] = None
            else:
                self._free.append(page)

    def remember(self, page: int) -> None:
        """Keep a referenced page when it is released, because the index of prefixes knows its content."""
        self._remembered[page] = True
