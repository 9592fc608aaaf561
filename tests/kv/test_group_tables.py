"""The tables of a cache with windowed groups, at random: each page has the rows that its sequences have there."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest

import gpu_actors as ga
from gpu_actors.kv.prefix import prompt_digests
from gpu_actors.kv.sequences import CacheTables, GroupSize, PageTable, Write

SIZE = 3
GROUPS = [GroupSize(24), GroupSize(18, window=4, slack=1), GroupSize(15, window=0)]


class Pages:
    """Tables, and the rows in each page. A row stands for its cause: the tokens up to it, or a number."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tables = CacheTables(GROUPS, SIZE)
        self.rows: dict[PageTable, list[Any]] = {}
        self.flying: dict[PageTable, list[Write]] = defaultdict(list)
        self.held: list[dict[tuple[int, int], Any]] = [{} for _ in GROUPS]
        self.done = Counter[str]()

    def prompt(self) -> list[int]:
        return self.some(range(self.random.randrange(1, 30)))

    def some(self, places: range) -> list[int]:
        """Tokens at these indices. There are few different prompts, so that many begin alike."""
        return [self.random.randrange(2) if place in (4, 11) else place for place in places]

    def pick(self, settled: bool) -> PageTable | None:
        tables = [table for table in self.rows if not (settled and self.flying[table])]
        return self.random.choice(tables) if tables else None

    def create(self) -> None:
        if len(self.rows) == 6:
            return
        tokens = self.prompt()
        digests = prompt_digests(tokens, SIZE)
        known = [
            count
            for count in range(len(digests) + 1)
            if all(
                digest in group.prefixes
                for group, size in zip(self.tables._groups, GROUPS, strict=True)
                for digest in digests[first_page(size, count * SIZE) : count]
            )
        ]
        table = self.tables.create(digests)
        assert table.length == max(known) * SIZE
        self.done["begins with pages"] += table.length > 0
        self.done["begins behind a window"] += table.groups[1].first > 0
        self.rows[table] = [tuple(tokens[: place + 1]) for place in range(table.length)]

    def reserve(self) -> None:
        table = self.pick(settled=False)
        if table is None:
            return
        count, before = self.random.randrange(1, 9), self.state()
        rows, tokens = self.rows[table], None
        if len(rows) < 30 and all(isinstance(row, tuple) for row in rows) and self.random.random() < 0.8:
            known = list(rows[-1]) if rows else []
            tokens = self.some(range(len(rows), len(rows) + count))
            new: list[Any] = [tuple(known + tokens[: index + 1]) for index in range(count)]
        else:
            new = [self.random.random() for _ in range(count)]
        ids = None if tokens is None else np.array(tokens, np.int64)
        try:
            (write,) = self.tables.reserve([table], [count], [ids])
        except ga.CacheFull:
            assert self.state() == before
            self.done["CacheFull"] += 1
            return
        for group, copy in write.copies.items():
            for slot in range(SIZE):
                self.held[group][copy.destination, slot] = self.held[group].get((copy.source, slot))
        for group, own in enumerate(table.groups):
            for place in range(len(rows), len(rows) + count):
                self.held[group][own.pages[place // SIZE - own.first], place % SIZE] = new[place - len(rows)]
        rows += new
        self.flying[table].append(write)

    def commit(self) -> None:
        table = self.pick(settled=False)
        if table is not None and self.flying[table]:
            self.tables.commit([self.flying[table].pop(0)])
            self.done["given back"] += table.groups[1].first > 0

    def undo(self) -> None:
        table = self.pick(settled=False)
        if table is not None and self.flying[table]:
            writes = self.flying.pop(table)
            self.tables.undo(writes)
            self.done["undone behind a window"] += table.groups[1].first > 0
            del self.rows[table][writes[0].length_before :]

    def truncate(self) -> None:
        table = self.pick(settled=True)
        if table is None:
            return
        length = max(0, table.length - self.random.randrange(4))
        try:
            self.tables.truncate(table, length)
        except ga.InvalidRequest:
            self.done["truncate refused"] += 1
            assert any(
                own.first and length - 1 - (size.window or 0) < own.first * SIZE
                for own, size in zip(table.groups, GROUPS, strict=True)
            )
            return
        del self.rows[table][length:]

    def fork(self) -> None:
        table = self.pick(settled=True)
        if table is not None and len(self.rows) < 6:
            self.rows[self.tables.fork(table)] = list(self.rows[table])

    def move(self) -> None:
        """Adopt a sequence's rows as a new sequence, whose launch succeeds or fails."""
        table = self.pick(settled=True)
        if table is None or len(self.rows) == 6:
            return
        rows, firsts, before = self.rows[table], [own.first for own in table.groups], self.state()
        try:
            write = self.tables.adopt(len(rows), firsts, table.digests, table.tail)
        except ga.CacheFull:
            assert self.state() == before
            return
        shared = write.length_before // SIZE
        self.done["moved beside a shared prefix"] += shared > 0
        self.done["moved behind a window"] += firsts[1] > 0
        for group, own in enumerate(write.table.groups):
            assert own.first == firsts[group]
            for place in range(max(own.first, shared) * SIZE, len(rows)):
                self.held[group][own.pages[place // SIZE - own.first], place % SIZE] = rows[place]
        if self.random.random() < 0.3:
            self.tables.free(write.table)
            return
        self.tables.commit([write])
        self.rows[write.table] = list(rows)
        if self.random.random() < 0.5:
            self.tables.free(table)
            del self.rows[table]

    def free(self) -> None:
        table = self.pick(settled=True)
        if table is not None and self.random.random() < 0.5:
            self.tables.free(table)
            del self.rows[table]

    def state(self) -> Any:
        tables = [(table.length, [(list(own.pages), own.first) for own in table.groups]) for table in self.rows]
        return tables, self.tables.group_stats()

    def check(self) -> None:
        for number, (group, size) in enumerate(zip(self.tables._groups, GROUPS, strict=True)):
            references = Counter(page for table in self.rows for page in table.groups[number].pages)
            flying = [write for writes in self.flying.values() for write in writes]
            references.update(write.copies[number].source for write in flying if number in write.copies)
            assert [group.pool.references(page) for page in range(size.blocks)] == [
                references[page] for page in range(size.blocks)
            ]
            for table, rows in self.rows.items():
                own = table.groups[number]
                assert len(own.pages) == -(-len(rows) // SIZE) - own.first
                settled = len(rows) if not self.flying[table] else self.flying[table][0].length_before
                assert own.first <= first_page(size._replace(slack=0), settled), "a row behind this one needs the page"
                for place in range(own.first * SIZE, len(rows)):
                    assert self.held[number][own.pages[place // SIZE - own.first], place % SIZE] == rows[place]
        assert all(table.length == len(rows) for table, rows in self.rows.items())


def first_page(size: GroupSize, length: int) -> int:
    """The index of the first page of the kept rows."""
    return 0 if size.window is None else max(0, length - 1 - size.window - size.slack) // SIZE


@pytest.mark.parametrize("part", range(4))
def test_pages_hold_what_sequences_have_there(part: int) -> None:
    done = Counter[str]()
    for seed in range(50):
        pages = Pages(seed * 4 + part)
        often, seldom = (
            (pages.reserve, pages.commit),
            (pages.create, pages.undo, pages.truncate, pages.fork, pages.free, pages.move),
        )
        for _ in range(80):
            pages.random.choice((*often, *often, *seldom))()
            pages.check()
        done += pages.done
    assert min(done.values()) > 4, done
    assert len(done) == 8, done
