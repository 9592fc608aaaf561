"""Which neighbours of a batch begin with the same pages."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from inside.kv import CacheTables, GroupSize, SharedPrefixes, shared_prefixes


def found(table: list[list[int]], most: list[int] | None = None) -> list[tuple[int, int]] | None:
    """(sequences, pages) of each group."""
    pages = max(map(len, table))
    padded = np.array([[*row, *[-1] * (pages - len(row))] for row in table], np.int32)
    groups = shared_prefixes(padded, np.array([len(row) for row in table] if most is None else most))
    if groups is None:
        return None
    return list(zip(np.diff(groups.ends).tolist(), groups.pages.tolist(), strict=True))


def test_neighbours_are_grouped_by_the_pages_that_they_begin_with() -> None:
    assert found([[7, 3, 9, 4], [7, 3, 9, 8, 2], [6], [5, 1], [5, 0]]) == [(2, 3), (1, 0), (2, 1)]
    assert found([[1, 2], [3, 2]]) is None, "only beginnings count"
    assert found([[1]]) is None
    assert found([[1, 2], [4], [1, 2]]) is None, "and only neighbours'"
    assert found([[1, 2], [1, 2], [1, 2]]) == [(3, 2)]


def test_pages_that_a_row_does_not_see_whole_are_not_shared() -> None:
    assert found([[1, 2, 3]] * 3, [3, 2, 3]) == [(3, 2)]
    assert found([[1, 2, 3]] * 3, [3, 0, 3]) is None
    assert found([[1, -1], [1, -1]], [1, 1]) == [(2, 1)], "past their last page tables are alike too"
    assert found([[-1], [-1]], [0, 0]) is None


def test_a_run_is_cut_where_its_parts_save_more() -> None:
    """Eight sequences begin with one page; four of them share a hundred more, and the others another hundred."""
    first, second = [0, *range(1, 101)], [0, *range(101, 201)]
    assert found([first] * 4 + [second] * 4) == [(4, 101), (4, 101)]
    assert found([[0, 1], [0, 2], [0, 3]]) == [(3, 1)]
    assert found([[0, 1], [0, 2], [0, 2]]) == [(3, 1)], "two pages either way, and one group less"
    assert found([[0, 9], [0, 1, 2, 3], [0, 1, 2, 4]]) == [(1, 0), (2, 3)]


def saved(groups: SharedPrefixes | None) -> int:
    return 0 if groups is None else int(((np.diff(groups.ends) - 1) * groups.pages).sum())


def best(common: list[int]) -> int:
    """The largest number of pages that a cut into runs saves."""
    most = 0
    for cuts in itertools.product((False, True), repeat=len(common)):
        total, run = 0, []
        for cut, pages in zip([*cuts, True], [*common, 0], strict=True):
            if cut:
                total += min(run, default=0) * len(run)
                run = []
            else:
                run.append(pages)
        most = max(most, total)
    return most


@pytest.mark.parametrize("seed", range(20))
def test_groups_share_what_they_say_and_save_nearly_the_most(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = np.full((9, 6), 1, np.int32)
    for row in range(1, 9):
        same = int(rng.integers(0, 7))
        table[row, :same] = table[row - 1, :same]
        table[row, same:] = rng.integers(2, 1 << 30, 6 - same)
    groups = shared_prefixes(table, np.full(9, 6))
    common = [int((np.cumprod(a == b)).sum()) for a, b in itertools.pairwise(table)]
    assert saved(groups) >= 0.8 * best(common)
    if groups is not None:
        assert groups.ends[0] == 0
        assert groups.ends[-1] == 9
        for (first, end), pages in zip(itertools.pairwise(groups.ends.tolist()), groups.pages.tolist(), strict=True):
            assert end > first
            assert (table[first:end, :pages] == table[first, :pages]).all()
            assert end - first > 1 or pages == 0


def test_thousands_of_cuts_end() -> None:
    table = np.tril(np.ones((1500, 1500), np.int32)) - 1 + np.arange(1500)[:, None] * np.triu(np.ones((1500, 1500)), 1)
    groups = shared_prefixes(table.astype(np.int32), np.full(1500, 1500))
    assert saved(groups) > 0


def test_a_cache_knows_how_much_could_be_shared() -> None:
    tables = CacheTables([GroupSize(32)], 4)
    one: Any = tables.create()
    tables.reserve([one], [11])
    assert tables.most_shared([one], 0) == 0
    others = [tables.fork(one) for _ in range(3)]
    assert tables.most_shared([one], 0) == 9
    assert tables.most_shared([one, *others], 0) == 9, "the same pages are counted once"
    other: Any = tables.create()
    assert tables.most_shared([other], 0) == 0
