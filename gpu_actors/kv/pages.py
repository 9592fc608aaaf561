"""PagePool: which pages of a KV cache are free, and how many references each other page has.

A page is free, referenced (by tables of sequences, and by writes that may be undone), or cached. A cached page has no
reference, but the index of prefixes has its content, so the next sequence with that prefix can begin with it. Cached
pages count as free: when the free ones run out, the pool evicts them, oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from gpu_actors.errors import CacheFull

__all__ = ["PagePool"]


class PagePool:
    """Pages 0 to blocks - 1. Every operation takes constant time per page.

    on_evict: called with a cached page that is evicted.
    """

    def __init__(self, blocks: int, on_evict: Callable[[int], None]) -> None:
        self.blocks = blocks
        self._on_evict = on_evict
        self._free = list(range(blocks - 1, -1, -1))
        self._references = [0] * blocks
        self._indexed = [False] * blocks
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._shared = 0

    @property
    def free_blocks(self) -> int:
        """Pages that `take` could return, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def cached_blocks(self) -> int:
        """Pages without a reference that the index of prefixes has."""
        return len(self._cached)

    @property
    def shared_blocks(self) -> int:
        """Pages with more than one reference."""
        return self._shared

    def snapshot(self) -> tuple[list[int], list[bool]]:
        """For each page: how many references it has, and whether the index of prefixes has it."""
        return list(self._references), list(self._indexed)

    def references(self, page: int) -> int:
        return self._references[page]

    def writable(self, page: int) -> bool:
        """Whether a row can be written to the page: it has one reference, and the index does not have it."""
        return self._references[page] == 1 and not self._indexed[page]

    def check(self, count: int) -> None:
        """Raise `CacheFull` if `take` would."""
        if count > self.free_blocks:
            raise CacheFull(f"{count} pages are needed, and {self.free_blocks} of {self.blocks} are free")

    def take(self, count: int) -> list[int]:
        """Take ``count`` pages, each with one reference. Raises `CacheFull`, and then none is taken."""
        self.check(count)
        while len(self._free) < count:
            page, _ = self._cached.popitem(last=False)
            self._indexed[page] = False
            self._on_evict(page)
            self._free.append(page)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, page: int) -> None:
        """Add a reference to a page that is referenced or cached."""
        count = self._references[page]
        if count == 0:
            del self._cached[page]
        elif count == 1:
            self._shared += 1
        self._references[page] = count + 1

    def release(self, page: int) -> None:
        """Remove a reference. After the last one the page is free, or cached if the index has it."""
        count = self._references[page] - 1
        self._references[page] = count
        if count == 1:
            self._shared -= 1
        elif count == 0:
            if self._indexed[page]:
                self._cached[page] = None
            else:
                self._free.append(page)

    def mark_indexed(self, page: int) -> None:
        """Note that the index of prefixes has a referenced page, which is cached once it is released."""
        self._indexed[page] = True
