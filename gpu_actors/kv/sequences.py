"""CacheTables: the sequences of a paged KV cache, their pages, and writes that have not ended.

A write is reserved before it is launched: its pages are taken and the sequence is as long as if it had succeeded, so
that what comes after it can be launched behind it. When it ends it is committed, or undone as if it had never been:

    reserve ──launch──> in flight ──> commit     old copies of shared pages are let go, whole prompt pages get names
       └───────────────────┴────────> undo       the sequence is as long as before, its epoch is one higher

Whatever was launched on a sequence at an earlier epoch has seen rows that were never written, and has to be repeated.
Pages go back to the pool at once, even if something in flight still uses them: the device works in the order of
launches, so a page's next owner writes it later.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpu_actors.errors import InvalidRequest
from gpu_actors.kv.pages import PagePool
from gpu_actors.kv.prefix import PrefixIndex

__all__ = ["CacheTables", "KvCacheStats", "PageTable", "Write"]


class KvCacheStats(NamedTuple):
    """blocks: pages in all. free_blocks: of them free, or kept for a prefix that may come again (prefix_blocks).

    shared_blocks: pages that several sequences read. prefix_hits: pages that `create` found. evicted: kept pages that
    were given up.
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
    """One sequence. digests: names of the pages that its prompt fills. writes: reserved and not ended.

    epoch: see the module. Freed sequences are in no table; what is in flight for them goes on.
    """

    number: int
    pages: list[int] = field(default_factory=list)
    length: int = 0
    epoch: int = 0
    digests: list[bytes] = field(default_factory=list)
    named: int = 0
    writes: int = 0
    freed: bool = False


class _Copy(NamedTuple):
    slot: int
    source: int
    destination: int


@dataclass(slots=True, eq=False)
class Write:
    """Rows on their way into one sequence. copies: shared pages to copy first, as (source, destination)."""

    table: PageTable
    start: int
    stop: int
    pages_before: int
    epoch: int
    copy: _Copy | None
    launched: bool = False

    @property
    def copies(self) -> tuple[tuple[int, int], ...]:
        return () if self.copy is None else ((self.copy.source, self.copy.destination),)

    @property
    def stale(self) -> bool:
        """The sequence is not as it was reserved: an earlier write was undone."""
        return self.epoch != self.table.epoch


class CacheTables:
    """The tables of one cache. Safe to use from the actor's thread and the completion thread at once."""

    def __init__(self, blocks: int, page_size: int) -> None:
        self.page_size = page_size
        self._lock = threading.Lock()
        self._prefixes = PrefixIndex()
        self._pool = PagePool(blocks, self._forget)
        self._tables: dict[int, PageTable] = {}
        self._writes: set[Write] = set()
        self._next = 1
        self._hits = self._evicted = 0

    def stats(self) -> KvCacheStats:
        with self._lock:
            pool = self._pool
            return KvCacheStats(
                blocks=pool.blocks,
                free_blocks=pool.free_blocks,
                sequences=len(self._tables),
                shared_blocks=pool.shared_blocks,
                prefix_blocks=pool.kept_blocks,
                prefix_hits=self._hits,
                evicted=self._evicted,
            )

    def find(self, number: int) -> PageTable:
        """The sequence of that number. Raises `InvalidRequest` for one that was freed."""
        table = self._tables.get(number)
        if table is None:
            raise InvalidRequest("seq", number, "is no sequence of this cache, or was freed")
        return table

    def length(self, number: int) -> int:
        """Rows of a sequence, those on their way included. Raises as `find`."""
        return self.find(number).length

    # Sequences

    def create(self, digests: Sequence[bytes] = ()) -> PageTable:
        """A new sequence, which begins with the pages that are known for ``digests``."""
        with self._lock:
            pages = self._prefixes.find(digests)
            for page in pages:
                self._pool.retain(page)
            self._hits += len(pages)
            table = self._add(pages, len(pages) * self.page_size)
            table.digests = list(digests)
            table.named = len(pages)
            return table

    def fork(self, table: PageTable) -> PageTable:
        """A sequence with the same rows in the same pages. No write to ``table`` may be on its way."""
        with self._lock:
            for page in table.pages:
                self._pool.retain(page)
            child = self._add(list(table.pages), table.length)
            # What the child appends is its own affair, and no part of the prompt that the parent was created for.
            child.digests = table.digests[: table.length // self.page_size]
            child.named = min(table.named, len(child.digests))
            return child

    def free(self, table: PageTable) -> None:
        """Forget a sequence. Its pages go back, the last first, so that prefixes are given up from their end."""
        with self._lock:
            del self._tables[table.number]
            table.freed = True
            for page in reversed(table.pages):
                self._pool.release(page)
            table.pages = []

    def truncate(self, table: PageTable, length: int) -> None:
        """Keep the first ``length`` rows. No write to ``table`` may be on its way."""
        with self._lock:
            if not 0 <= length <= table.length:
                raise InvalidRequest("length", length, f"must be at most the rows that there are, {table.length}")
            self._cut(table, -(-length // self.page_size), length)
            # Rows that come in the place of those cut off are not the prompt's.
            whole = length // self.page_size
            table.digests = table.digests[:whole]
            table.named = min(table.named, whole)

    # Writes

    def reserve(self, tables: Sequence[PageTable], rows: Sequence[int]) -> list[Write]:
        """Room for so many more rows, at least one, of each sequence.

        Raises `CacheFull`, and then nothing has changed.
        """
        with self._lock:
            size = self.page_size
            copies = [table.length % size > 0 and not self._pool.writable(table.pages[-1]) for table in tables]
            grown = [
                -(-(table.length + more) // size) - len(table.pages) for table, more in zip(tables, rows, strict=True)
            ]
            taken = self._pool.take(sum(grown) + sum(copies))
            writes: list[Write] = []
            for table, more, copied, count in zip(tables, rows, copies, grown, strict=True):
                write = Write(table, table.length, table.length + more, len(table.pages), table.epoch, None)
                if copied:
                    destination = taken.pop()
                    # The old page's reference goes from the table to the write, which may have to give it back.
                    write.copy = _Copy(len(table.pages) - 1, table.pages[-1], destination)
                    table.pages[-1] = destination
                table.pages += [taken.pop() for _ in range(count)]
                table.length = write.stop
                table.writes += 1
                writes.append(write)
            self._writes.update(writes)
            return writes

    def commit(self, writes: Sequence[Write]) -> None:
        """These have been carried out. One that has become stale changes nothing any more."""
        with self._lock:
            for write in writes:
                self._end(write)
                if not write.table.freed and not write.stale:
                    self._name_pages(write)

    def undo(self, writes: Sequence[Write]) -> None:
        """These have not been, and never will be."""
        with self._lock:
            for write in reversed(writes):
                self._undo(write)

    def undo_unlaunched(self) -> None:
        """Undo what an actor reserved and died before it launched."""
        with self._lock:
            lost = [write for write in self._writes if not write.launched]
            for write in sorted(lost, key=lambda write: -write.start):
                self._undo(write)

    # Under the lock

    def _add(self, pages: list[int], length: int) -> PageTable:
        table = PageTable(self._next, pages, length)
        self._next += 1
        self._tables[table.number] = table
        return table

    def _undo(self, write: Write) -> None:
        table, copy = write.table, write.copy
        if not table.freed and not write.stale:
            table.epoch += 1
            self._cut(table, write.pages_before, write.start)
            if copy is not None:
                table.pages[copy.slot] = copy.source
                self._pool.release(copy.destination)
                write.copy = None
        self._end(write)

    def _end(self, write: Write) -> None:
        self._writes.discard(write)
        write.table.writes -= 1
        if write.copy is not None:
            self._pool.release(write.copy.source)
            write.copy = None

    def _cut(self, table: PageTable, pages: int, length: int) -> None:
        for page in reversed(table.pages[pages:]):
            self._pool.release(page)
        del table.pages[pages:]
        table.length = length

    def _name_pages(self, write: Write) -> None:
        table = write.table
        whole = min(write.stop // self.page_size, len(table.digests))
        for index in range(table.named, whole):
            page = table.pages[index]
            if self._prefixes.add(table.digests[index], page):
                self._pool.remember(page)
        table.named = max(table.named, whole)

    def _forget(self, page: int) -> None:
        self._prefixes.forget(page)
        self._evicted += 1
