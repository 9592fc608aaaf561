"""CacheTables: the sequences of a paged KV cache, their pages, and writes in flight.

The layers of a cache are in groups. Each group has a pool of its own, and a sequence has a list of pages in each.

A write is reserved just before its launch: its pages are taken, and the sequence is as long as if the launch had
succeeded, so that the next launch can build on it. At the end of the launch the write is committed or undone:

    reserve ──launch──> in flight ──> commit     originals of copied pages are released, whole prompt pages are indexed
       │                   │
       └───────────────────┴────────> undo       the sequence is as long as before

In a group with a window, a commit gives back the pages whose rows no later row sees. A reservation gives none back, so
that the rows before an undone write are still there.

Writes to one sequence are undone from the last one backwards. Their pages return to the pool at once, even while a
launch in flight still uses them: the device runs launches in order, so the next owner writes them later.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gpu_actors.errors import CacheFull, InvalidRequest
from gpu_actors.kv.pages import PagePool
from gpu_actors.kv.prefix import PrefixIndex, Tokens, extend_digests

__all__ = [
    "CacheTables",
    "GroupPages",
    "GroupSize",
    "KvCacheStats",
    "PageCopy",
    "PageTable",
    "Write",
    "block_table",
    "first_page",
    "table_width",
]


class KvCacheStats(NamedTuple):
    """Counts of pages and sequences. If the layers of a cache are in several groups, the pages are those of one group.

    blocks: all pages.
    free_blocks: pages that are free, or cached for the next prompt with their prefix.
    sequences: sequences that are not freed.
    shared_blocks: pages that several sequences read.
    prefix_blocks: the cached pages.
    prefix_hits: pages with which new sequences began.
    evicted: cached pages that were taken for other rows.
    """

    blocks: int
    free_blocks: int
    sequences: int
    shared_blocks: int
    prefix_blocks: int
    prefix_hits: int
    evicted: int


class GroupSize(NamedTuple):
    """The size of a group of layers. blocks: pages of its pool. window, slack: as in `KvLayer`."""

    blocks: int
    window: int | None = None
    slack: int = 0


@dataclass(slots=True, eq=False)
class GroupPages:
    """The pages of one sequence in the pool of one group of layers.

    pages: int32, so that they can be copied to a block table at once.
    named: how many pages, from the sequence's first on, the index of prefixes has been given.
    first: how many pages came before these. The sequence does not have them any more.
    """

    pages: array[int] = field(default_factory=lambda: array("i"))
    named: int = 0
    first: int = 0


@dataclass(slots=True, eq=False)
class PageTable:
    """One sequence.

    groups: its pages in each group of layers.
    digests: names of the pages whose tokens are known, from the first on.
    tail: the known tokens after those pages.
    users: how many requests in flight read or write the sequence. While there are any, rows may be appended and nothing
        else may change.
    """

    number: int
    groups: list[GroupPages]
    length: int = 0
    digests: list[bytes] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    users: int = 0


class PageCopy(NamedTuple):
    """A shared page that a write copies first. slot: its place in the sequence. destination: its replacement."""

    slot: int
    source: int
    destination: int


@dataclass(slots=True, eq=False)
class Write:
    """Rows that are being written to one sequence, up to ``stop``.

    length_before, tail: of the sequence, before the write.
    copies: by the number of a group, the shared page that is copied first.
    """

    table: PageTable
    stop: int
    length_before: int
    tail: list[int]
    copies: dict[int, PageCopy] = field(default_factory=dict)


class _Group:
    """The pool of one group of layers, and the index of its pages that prompts begin with."""

    def __init__(self, size: GroupSize) -> None:
        self.prefixes = PrefixIndex()
        self.pool = PagePool(size.blocks, self._forget)
        self.hits = 0
        self.evicted = 0
        self.window = size.window
        self.slack = size.slack

    def first_page(self, length: int, page_size: int) -> int:
        """The first page that a sequence of ``length`` rows needs for later rows."""
        return first_page(length, page_size, self.window, self.slack)

    def release(self, pages: Sequence[int]) -> None:
        """Release pages of a sequence, the last first, so that prefixes are evicted from their end.

        With a window, release the first page first: a longer prompt needs only the later ones.
        """
        for page in reversed(pages) if self.window is None else pages:
            self.pool.release(page)

    def _forget(self, page: int) -> None:
        self.prefixes.forget(page)
        self.evicted += 1


class CacheTables:
    """The tables of one cache. The actor's thread and the completion thread may use it at the same time.

    sizes: of each group.
    """

    def __init__(self, sizes: Sequence[GroupSize], page_size: int) -> None:
        self.page_size = page_size
        self._lock = threading.Lock()
        self._groups = [_Group(size) for size in sizes]
        self._windowed = [(index, group) for index, group in enumerate(self._groups) if group.window is not None]
        self._tables: dict[int, PageTable] = {}
        self._next = 1
        self._sharing = False  # whether a page ever was shared

    def stats(self) -> KvCacheStats:
        """The counts of the fullest group, which has the smallest share of its pages free."""
        with self._lock:
            return self._stats(self._groups[self._fullest()])

    def group_stats(self) -> list[KvCacheStats]:
        """The counts of each group."""
        with self._lock:
            return list(map(self._stats, self._groups))

    def snapshot(self) -> tuple[int, list[int], list[bool]]:
        """The number of the fullest group, and its `PagePool.snapshot`. The lock is held while two lists are copied."""
        with self._lock:
            fullest = self._fullest()
            return fullest, *self._groups[fullest].pool.snapshot()

    def find(self, number: int, field: str = "seq") -> PageTable:
        """The sequence with this number. Raises `InvalidRequest` for ``field`` if it was freed."""
        table = self._tables.get(number)
        if table is None:
            raise InvalidRequest(field, number, "is no sequence of this cache, or was freed")
        return table

    # Sequences

    def create(self, digests: Sequence[bytes] = ()) -> PageTable:
        """A new sequence, which begins with the indexed pages of ``digests``."""
        with self._lock:
            count, found = self._find_prefix(digests)
            table = self._add(found, count * self.page_size)
            table.digests = list(digests[:count])
            return table

    def most_shared(self, tables: Sequence[PageTable], group: int) -> int:
        """At most how many page reads are repeated because other sequences share the pages of these."""
        shared: dict[int, int] = {}
        if not self._sharing:
            return 0
        with self._lock:
            pool = self._groups[group].pool
            for table in tables:
                pages = table.groups[group].pages
                if pages:
                    first = pages[0]  # no later page has more references
                    others = (pool.references(first) - 1) * len(pages)
                    shared[first] = max(shared.get(first, 0), others)
        return sum(shared.values())

    def enter(self, tables: Sequence[PageTable]) -> None:
        """Note that a request uses these sequences until `leave`."""
        with self._lock:
            for table in tables:
                table.users += 1

    def leave(self, tables: Sequence[PageTable]) -> None:
        """Note that the request has ended."""
        with self._lock:
            for table in tables:
                table.users -= 1

    def fork(self, table: PageTable) -> PageTable:
        """A sequence with the same rows in the same pages."""
        with self._lock:
            for group, own in zip(self._groups, table.groups, strict=True):
                for page in own.pages:
                    group.pool.retain(page)
            self._sharing = True
            child = self._add([GroupPages(own.pages[:], own.named, own.first) for own in table.groups], table.length)
            child.digests, child.tail = list(table.digests), list(table.tail)
            return child

    def free(self, table: PageTable) -> None:
        """Forget a sequence, and release its pages."""
        with self._lock:
            if self._tables.pop(table.number, None) is None:
                return  # freed already, perhaps by another thread
            for group, own in zip(self._groups, table.groups, strict=True):
                group.release(own.pages)
                own.pages = array("i")

    def adopt(self, length: int, firsts: Sequence[int], digests: Sequence[bytes], tail: Sequence[int]) -> Write:
        """A new sequence of ``length`` rows. It begins with the indexed pages of ``digests``; new pages follow.

        firsts: of each group, the first page that the sequence has: `first_page` of its length at least.
        tail: the known tokens after those of the digests.
        Only `commit` or `free` may follow. Raises `CacheFull`, and then nothing has changed.
        """
        with self._lock:
            count, found = self._find_prefix(digests, firsts)
            total = -(-length // self.page_size)
            try:
                taken = self._take([total - own.first - len(own.pages) for own in found])
            except CacheFull:
                for group, own in zip(self._groups, found, strict=True):
                    group.release(own.pages)
                    group.hits -= len(own.pages)
                raise
            for own, pages in zip(found, taken, strict=True):
                own.pages.extend(pages)
            table = self._add(found, length)
            table.digests, table.tail = list(digests), list(tail)
            return Write(table, length, count * self.page_size, [])

    def truncate(self, table: PageTable, length: int) -> None:
        """Keep the first ``length`` rows."""
        with self._lock:
            self._check_cut(table, length)
            self._cut(table, length)

    def check_cut(self, table: PageTable, length: int) -> None:
        """Raise `InvalidRequest` if `truncate` would."""
        with self._lock:
            self._check_cut(table, length)

    # Writes

    def reserve(
        self, tables: Sequence[PageTable], rows: Sequence[int], tokens: Sequence[Tokens | None] | None = None
    ) -> list[Write]:
        """Reserve pages for new rows. Raises `CacheFull`, and then nothing has changed.

        rows: how many new rows each sequence gets, at least one. tokens: the tokens of these rows, if known.
        """
        with self._lock:
            size = self.page_size
            writes = [
                Write(table, table.length + more, table.length, table.tail[:])
                for table, more in zip(tables, rows, strict=True)
            ]
            counts = list[int]()
            for index, group in enumerate(self._groups):
                count = 0
                for write in writes:
                    own = write.table.groups[index]
                    pages = own.pages
                    count += -(-write.stop // size) - own.first - len(pages)
                    if write.length_before % size and not group.pool.writable(pages[-1]):
                        count += 1
                        # The old page's reference moves from the table to the write, which may return it.
                        write.copies = {**write.copies, index: PageCopy(own.first + len(pages) - 1, pages[-1], -1)}
                counts.append(count)
            for index, new_pages in enumerate(self._take(counts)):
                for write in writes:
                    own = write.table.groups[index]
                    pages = own.pages
                    if index in write.copies:
                        pages[-1] = new_pages.pop()
                        write.copies[index] = write.copies[index]._replace(destination=pages[-1])
                    for _ in range(own.first + len(pages), -(-write.stop // size)):
                        pages.append(new_pages.pop())
            if tokens is not None:
                for write, ids in zip(writes, tokens, strict=True):
                    if ids is not None:
                        self._extend_digests(write.table, ids)
            for write in writes:
                write.table.length = write.stop
            return writes

    def commit(self, writes: Sequence[Write]) -> None:
        """Commit writes that the launch has carried out."""
        with self._lock:
            for write in writes:
                if write.copies:
                    for index, copy in write.copies.items():
                        self._groups[index].pool.release(copy.source)
                if self._tables.get(write.table.number) is write.table:  # an import that was given up has freed it
                    self._index_pages(write)
                    self._give_back(write)

    def undo(self, writes: Sequence[Write]) -> None:
        """Undo writes that are not carried out. Later writes to the same sequences must have been undone."""
        with self._lock:
            for write in reversed(writes):
                table = write.table
                self._cut(table, write.length_before)
                table.tail = write.tail  # the tokens of a page that the write completed are known again
                for index, copy in write.copies.items():
                    own = table.groups[index]
                    own.pages[copy.slot - own.first] = copy.source
                    self._groups[index].pool.release(copy.destination)

    # Under the lock

    def _stats(self, group: _Group) -> KvCacheStats:
        pool = group.pool
        return KvCacheStats(
            blocks=pool.blocks,
            free_blocks=pool.free_blocks,
            sequences=len(self._tables),
            shared_blocks=pool.shared_blocks,
            prefix_blocks=pool.cached_blocks,
            prefix_hits=group.hits,
            evicted=group.evicted,
        )

    def _fullest(self) -> int:
        pools = [group.pool for group in self._groups]
        return min(range(len(pools)), key=lambda index: pools[index].free_blocks / pools[index].blocks)

    def _find_prefix(
        self, digests: Sequence[bytes], firsts: Sequence[int] | None = None
    ) -> tuple[int, list[GroupPages]]:
        """Retain the pages that a prompt may begin with. Returns how many there are, and each group's pages.

        firsts: the first page that the sequence has in each group. None: the first page that later rows need.
        """
        count = self._known(digests)
        found: list[GroupPages] = []
        for index, group in enumerate(self._groups):
            first = group.first_page(count * self.page_size, self.page_size) if firsts is None else firsts[index]
            pages = array("i", group.prefixes.find(digests[first:count]))
            for page in pages:
                group.pool.retain(page)
            group.hits += len(pages)
            found.append(GroupPages(pages, count, first))
        self._sharing |= count > 0
        return count, found

    def _known(self, digests: Sequence[bytes]) -> int:
        """How many first pages all groups still have. A group with a window needs only those that later rows need."""
        count = len(digests)
        for group in self._groups:
            if group.window is None:
                count = min(count, len(group.prefixes.find(digests)))
        if not self._windowed or not count:
            return count
        fits = [True] * (count + 1)
        for _, group in self._windowed:
            run = 0
            for pages, digest in enumerate(digests[:count], 1):
                run = run + 1 if digest in group.prefixes else 0
                fits[pages] &= run >= pages - group.first_page(pages * self.page_size, self.page_size)
        return max(pages for pages, fit in enumerate(fits) if fit)

    def _take(self, counts: Sequence[int]) -> list[list[int]]:
        """Take ``counts`` pages of the groups. Raises `CacheFull`, and then none is taken."""
        if len(counts) > 1:
            for index, (group, count) in enumerate(zip(self._groups, counts, strict=True)):
                try:
                    group.pool.check(count)
                except CacheFull as error:
                    raise CacheFull(f"{error} in group {index} of the layers") from None
        return [group.pool.take(count) for group, count in zip(self._groups, counts, strict=True)]

    def _add(self, groups: list[GroupPages], length: int) -> PageTable:
        table = PageTable(self._next, groups, length)
        self._next += 1
        self._tables[table.number] = table
        return table

    def _extend_digests(self, table: PageTable, ids: Tokens) -> None:
        """Note the tokens of the next rows, if all tokens before them are known."""
        if len(table.digests) * self.page_size + len(table.tail) == table.length:
            tokens = np.concatenate([np.array(table.tail, np.int64), ids])
            table.tail = extend_digests(table.digests, tokens, self.page_size).tolist()

    def _cut(self, table: PageTable, length: int) -> None:
        kept = -(-length // self.page_size)
        for group, own in zip(self._groups, table.groups, strict=True):
            group.release(own.pages[kept - own.first :])
            del own.pages[kept - own.first :]
        table.length = length
        whole = len(table.digests) * self.page_size
        if length < whole:
            # The tokens of a page that is no longer whole are dropped, so it gets no name.
            del table.digests[length // self.page_size :]
            for own in table.groups:
                own.named = min(own.named, len(table.digests))
            table.tail = []
        else:
            del table.tail[length - whole :]

    def _check_cut(self, table: PageTable, length: int) -> None:
        if not 0 <= length <= table.length:
            raise InvalidRequest("length", length, f"must be at most the rows that there are, {table.length}")
        for index, group in self._windowed:
            given_back = table.groups[index].first * self.page_size
            least = given_back + 1 + (group.window or 0)
            if given_back and length < least:
                reason = f"must be at least {least}: pages that the window of an earlier row needs were given back"
                raise InvalidRequest("length", length, reason)

    def _give_back(self, write: Write) -> None:
        """Release the pages that windows have left. The next row may follow this write: later ones may be undone."""
        for index, group in self._windowed:
            own = write.table.groups[index]
            first = group.first_page(write.stop, self.page_size)
            if first > own.first:
                group.release(own.pages[: first - own.first])
                del own.pages[: first - own.first]
                own.first = first

    def _index_pages(self, write: Write) -> None:
        table = write.table
        whole = min(write.stop // self.page_size, len(table.digests))
        if not whole:
            return
        for group, own in zip(self._groups, table.groups, strict=True):
            for index in range(max(own.named, own.first), whole):
                page = own.pages[index - own.first]
                if group.prefixes.add(table.digests[index], page):
                    group.pool.mark_indexed(page)
            own.named = max(own.named, whole)


def first_page(length: int, page_size: int, window: int | None, slack: int) -> int:
    """The first page that a sequence of ``length`` rows needs for later rows. window, slack: as in `KvLayer`."""
    return 0 if window is None else max(0, length - 1 - window - slack) // page_size


def table_width(pages: int, most: int) -> int:
    """The columns of a block table for sequences of at most ``pages`` pages: a power of two, and at most ``most``.

    A plan belongs to a width, so a growing sequence keeps its plan for most of its new pages. If ``most`` is less than
    ``pages``, there are as many columns as pages.
    """
    return max(1, pages, min(most, 1 << max(0, pages - 1).bit_length()))


def block_table(
    tables: Sequence[PageTable], group: int, most: int, least: int = 0, begins: Sequence[int] | None = None
) -> Any:
    """A block table, int32 (batch, columns), as wide as `table_width` says and at least ``least``.

    After a sequence's last page it is -1.
    group: of layers, by number. begins: of each sequence, the first page in the table. None: page 0.
    """
    owned = [table.groups[group].pages for table in tables]
    if begins is not None:
        firsts = [table.groups[group].first for table in tables]
        owned = [pages[begin - first :] for pages, begin, first in zip(owned, begins, firsts, strict=True)]
    width = max(least, table_width(max(map(len, owned), default=0), most))
    block_ids = np.empty((len(tables), width), np.int32)
    block_ids.fill(-1)
    for row, pages in zip(block_ids, owned, strict=True):
        row[: len(pages)] = pages
    return block_ids
