"""CacheTables: the sequences of a paged KV cache, their pages, and writes in flight.

A write is reserved just before its launch: its pages are taken, and the sequence is as long as if the launch had
succeeded, so that the next launch can build on it. At the end of the launch the write is committed or undone:

    reserve ──launch──> in flight ──> commit     originals of copied pages are released, whole prompt pages are indexed
       │                   │
       └───────────────────┴────────> undo       the sequence is as long as before

Writes to one sequence are undone from the last one backwards. Their pages return to the pool at once, even while a
launch in flight still uses them: the device runs launches in order, so the next owner writes them later.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gpu_actors.errors import CacheFull, InvalidRequest
from gpu_actors.kv.pages import PagePool
from gpu_actors.kv.prefix import PrefixIndex, Tokens, extend_digests

__all__ = ["CacheTables", "KvCacheStats", "PageCopy", "PageTable", "Write", "block_table", "table_width"]


class KvCacheStats(NamedTuple):
    """Counts of pages and sequences.

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


@dataclass(slots=True, eq=False)
class PageTable:
    """One sequence.

    pages: int32, so that a block table takes them in at once.
    digests: names of the pages whose tokens are known, from the first on.
    named: how many of them the index of prefixes has.
    tail: the known tokens behind them.
    users: requests in flight that read or write the sequence. While there are any, rows may be appended and nothing
        else may change.
    """

    number: int
    pages: array[int] = field(default_factory=lambda: array("i"))
    length: int = 0
    digests: list[bytes] = field(default_factory=list)
    named: int = 0
    tail: list[int] = field(default_factory=list)
    users: int = 0


class PageCopy(NamedTuple):
    """A shared page that a write copies first. slot: its place in the table. destination: the page in its place."""

    slot: int
    source: int
    destination: int


@dataclass(slots=True, eq=False)
class Write:
    """Rows that are being written to one sequence, up to ``stop``.

    pages_before, length_before, tail: of the sequence, before the write.
    copy: a shared page that is copied first.
    """

    table: PageTable
    stop: int
    pages_before: int
    length_before: int
    tail: list[int]
    copy: PageCopy | None = None


class CacheTables:
    """The tables of one cache. The actor's thread and the completion thread may use it at the same time."""

    def __init__(self, blocks: int, page_size: int) -> None:
        self.page_size = page_size
        self._lock = threading.Lock()
        self._prefixes = PrefixIndex()
        self._pool = PagePool(blocks, self._forget)
        self._tables: dict[int, PageTable] = {}
        self._next = 1
        self._hits = self._evicted = 0
        self._sharing = False  # whether a page ever was shared

    def stats(self) -> KvCacheStats:
        with self._lock:
            pool = self._pool
            return KvCacheStats(
                blocks=pool.blocks,
                free_blocks=pool.free_blocks,
                sequences=len(self._tables),
                shared_blocks=pool.shared_blocks,
                prefix_blocks=pool.cached_blocks,
                prefix_hits=self._hits,
                evicted=self._evicted,
            )

    def snapshot(self) -> tuple[list[int], list[bool]]:
        """See `PagePool.snapshot`. The lock is held while two lists are copied."""
        with self._lock:
            return self._pool.snapshot()

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
            pages = self._prefixes.find(digests)
            for page in pages:
                self._pool.retain(page)
            self._hits += len(pages)
            self._sharing |= bool(pages)
            table = self._add(pages, len(pages) * self.page_size)
            table.digests = list(digests[: len(pages)])
            table.named = len(pages)
            return table

    def most_shared(self, tables: Sequence[PageTable]) -> int:
        """An upper bound of how many pages are read again for other sequences that share them with these."""
        shared: dict[int, int] = {}
        if not self._sharing:
            return 0
        with self._lock:
            for table in tables:
                if table.pages:
                    first = table.pages[0]  # no later page has more references
                    others = (self._pool.references(first) - 1) * len(table.pages)
                    shared[first] = max(shared.get(first, 0), others)
        return sum(shared.values())

    def enter(self, tables: Sequence[PageTable]) -> None:
        """A request uses these sequences until `leave`."""
        with self._lock:
            for table in tables:
                table.users += 1

    def leave(self, tables: Sequence[PageTable]) -> None:
        """The request has ended."""
        with self._lock:
            for table in tables:
                table.users -= 1

    def fork(self, table: PageTable) -> PageTable:
        """A sequence with the same rows in the same pages."""
        with self._lock:
            for page in table.pages:
                self._pool.retain(page)
            self._sharing = True
            child = self._add(table.pages, table.length)
            child.digests, child.named, child.tail = list(table.digests), table.named, list(table.tail)
            return child

    def free(self, table: PageTable) -> None:
        """Forget a sequence. Its pages are released, the last first, so that prefixes are evicted from their end."""
        with self._lock:
            if self._tables.pop(table.number, None) is None:
                return  # freed already, perhaps by another thread
            for page in reversed(table.pages):
                self._pool.release(page)
            table.pages = array("i")

    def adopt(self, length: int, digests: Sequence[bytes], tail: Sequence[int]) -> Write:
        """A new sequence of ``length`` rows: it begins with the indexed pages of ``digests``, and has new ones behind.

        tail: the known tokens behind those of the digests.
        Only `commit` or `free` may follow. Raises `CacheFull`, and then nothing has changed.
        """
        with self._lock:
            pages = self._prefixes.find(digests)
            for page in pages:
                self._pool.retain(page)
            try:
                new_pages = self._pool.take(-(-length // self.page_size) - len(pages))
            except CacheFull:
                for page in reversed(pages):
                    self._pool.release(page)
                raise
            self._hits += len(pages)
            self._sharing |= bool(pages)
            table = self._add([*pages, *new_pages], length)
            table.digests, table.named, table.tail = list(digests), len(pages), list(tail)
            return Write(table, length, len(pages), len(pages) * self.page_size, [])

    def truncate(self, table: PageTable, length: int) -> None:
        """Keep the first ``length`` rows."""
        with self._lock:
            if not 0 <= length <= table.length:
                raise InvalidRequest("length", length, f"must be at most the rows that there are, {table.length}")
            self._cut(table, -(-length // self.page_size), length)

    # Writes

    def reserve(
        self, tables: Sequence[PageTable], rows: Sequence[int], tokens: Sequence[Tokens | None] | None = None
    ) -> list[Write]:
        """Reserve pages for new rows. Raises `CacheFull`, and then nothing has changed.

        rows: how many new rows each sequence gets, at least one. tokens: the tokens of these rows, if known.
        """
        with self._lock:
            size = self.page_size
            copies = [table.length % size > 0 and not self._pool.writable(table.pages[-1]) for table in tables]
            grown = [
                -(-(table.length + more) // size) - len(table.pages) for table, more in zip(tables, rows, strict=True)
            ]
            new_pages = self._pool.take(sum(grown) + sum(copies))
            writes: list[Write] = []
            row_tokens = [None] * len(tables) if tokens is None else tokens
            for table, more, copied, count, ids in zip(tables, rows, copies, grown, row_tokens, strict=True):
                write = Write(table, table.length + more, len(table.pages), table.length, list(table.tail))
                if copied:
                    destination = new_pages.pop()
                    # The old page's reference moves from the table to the write, which may return it.
                    write.copy = PageCopy(len(table.pages) - 1, table.pages[-1], destination)
                    table.pages[-1] = destination
                for _ in range(count):
                    table.pages.append(new_pages.pop())
                if ids is not None:
                    self._extend_digests(table, ids)
                table.length = write.stop
                writes.append(write)
            return writes

    def commit(self, writes: Sequence[Write]) -> None:
        """The launch has carried out these writes."""
        with self._lock:
            for write in writes:
                if write.copy is not None:
                    self._pool.release(write.copy.source)
                if self._tables.get(write.table.number) is write.table:  # and not one whose import was given up
                    self._index_pages(write)

    def undo(self, writes: Sequence[Write]) -> None:
        """Undo writes that are not carried out. Later writes to the same sequences must have been undone."""
        with self._lock:
            for write in reversed(writes):
                table, copy = write.table, write.copy
                self._cut(table, write.pages_before, write.length_before)
                table.tail = write.tail  # the tokens of a page that the write ended are known again
                if copy is not None:
                    table.pages[copy.slot] = copy.source
                    self._pool.release(copy.destination)

    # Under the lock

    def _add(self, pages: Iterable[int], length: int) -> PageTable:
        table = PageTable(self._next, array("i", pages), length)
        self._next += 1
        self._tables[table.number] = table
        return table

    def _extend_digests(self, table: PageTable, ids: Tokens) -> None:
        """Note the tokens of the next rows, if all tokens before them are known."""
        if len(table.digests) * self.page_size + len(table.tail) == table.length:
            tokens = np.concatenate([np.array(table.tail, np.int64), ids])
            table.tail = extend_digests(table.digests, tokens, self.page_size).tolist()

    def _cut(self, table: PageTable, pages: int, length: int) -> None:
        for page in reversed(table.pages[pages:]):
            self._pool.release(page)
        del table.pages[pages:]
        table.length = length
        whole = len(table.digests) * self.page_size
        if length < whole:
            # The tokens of a page that is begun are dropped: it gets no name.
            del table.digests[length // self.page_size :]
            table.named = min(table.named, len(table.digests))
            table.tail = []
        else:
            del table.tail[length - whole :]

    def _index_pages(self, write: Write) -> None:
        table = write.table
        whole = min(write.stop // self.page_size, len(table.digests))
        for index in range(table.named, whole):
            page = table.pages[index]
            if self._prefixes.add(table.digests[index], page):
                self._pool.mark_indexed(page)
        table.named = max(table.named, whole)

    def _forget(self, page: int) -> None:
        self._prefixes.forget(page)
        self._evicted += 1


def table_width(pages: int, most: int) -> int:
    """The columns of a block table for sequences of at most so many pages: a power of two, and at most ``most``.

    A plan belongs to a width, so that most new pages of a growing sequence keep the plan. most: where it is less than
    ``pages``, there are as many columns as pages.
    """
    return max(1, pages, min(most, 1 << max(0, pages - 1).bit_length()))


def block_table(tables: Sequence[PageTable], most: int, least: int = 0) -> Any:
    """int32 (batch, columns), as wide as `table_width` says, or ``least``. Behind a sequence's last page it is -1."""
    width = max(least, table_width(max((len(table.pages) for table in tables), default=0), most))
    block_ids = np.empty((len(tables), width), np.int32)
    block_ids.fill(-1)
    for row, table in zip(block_ids, tables, strict=True):
        row[: len(table.pages)] = table.pages
    return block_ids
