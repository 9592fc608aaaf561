"""KeySplit: which worker has which keys of a sequence, and what each is asked so that a row sees its own keys.

    3 workers, runs of 2     position   0  1 | 2  3 | 4  5 | 6  7 | 8  9 | 10 11 | 12
                             worker     0  0 | 1  1 | 2  2 | 0  0 | 1  1 |  2  2 |  0
    keys of worker 0, by their place there                   0  1    2  3             4

The keys of a worker are in order. So the keys that a row sees are [0, sinks) and [first, last) on every worker too,
with bounds that are counted there. A cache takes such bounds as a window, whose row lies on the last key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_actors.attention.key_mask import KeyMask

__all__ = ["KeySplit", "RowsAsked"]

_Ints = npt.NDArray[np.int64]


class RowsAsked(NamedTuple):
    """One request for some rows. rows: of those asked for. keys: the first so many of the worker's keys are attended.

    reach: keys that the window goes back from the row's own, or -1. sinks: the first keys, which stay visible.
    apart: each row is a sequence of one row, whose own key is the last one. Otherwise they are the last rows of one
    sequence, and see all keys behind their window's beginning.
    """

    rows: slice
    keys: int
    reach: int
    sinks: int
    apart: bool


class KeySplit(NamedTuple):
    """Keys dealt out over ``workers``, ``run`` of them after each other, and the first run to worker 0."""

    workers: int
    run: int

    def before(self, worker: int, position: Any) -> Any:
        """How many keys of a worker come before a position of the whole sequence, or before each of several."""
        whole, rest = np.divmod(position, self.run * self.workers)
        return whole * self.run + np.clip(rest - worker * self.run, 0, self.run)

    def lengths(self, length: int) -> list[int]:
        """How many keys each worker has of the first ``length``."""
        return [int(self.before(worker, length)) for worker in range(self.workers)]

    def owners(self, begin: int, end: int) -> _Ints:
        """(end - begin,): whose key each position is."""
        return np.arange(begin, end) // self.run % self.workers

    def position(self, worker: int, key: int) -> int:
        """Where the key of a worker stands in the whole sequence."""
        whole, rest = divmod(key, self.run)
        return (whole * self.workers + worker) * self.run + rest

    def step(self, length: int) -> int:
        """How far neighbouring keys of a worker are apart in the first ``length``; 0 where that is not the same for
        all."""
        if self.workers == 1 or length <= self.run * self.workers:
            return 1
        return self.workers if self.run == 1 else 0

    def tree(self, worker: int, begin: int, sees: Any) -> Any:
        """uint64 (rows,): the tree mask of a worker's own last ``rows`` keys.

        sees: bool (rows, rows), which of the keys at ``begin`` and after each row sees. Every key before them is seen.
        """
        count = len(sees)
        mine = np.flatnonzero(self.owners(begin, begin + count) == worker)
        bits = np.uint64(1) << np.arange(count, dtype=np.uint64)
        found = np.full(count, bits[: count - len(mine)].sum(dtype=np.uint64), np.uint64)
        return found + np.where(sees[:, mine], bits[count - len(mine) :], np.uint64(0)).sum(axis=1, dtype=np.uint64)

    def asked(self, worker: int, positions: _Ints, length: int, mask: KeyMask) -> list[RowsAsked]:
        """The requests to a worker for rows at ``positions``, which follow each other, and the first ``length`` keys.

        mask: of the whole problem. Rows that see no key of the worker are in no request.
        """
        sinks, first, last = self._bounds(worker, positions, length, mask)
        asked: list[RowsAsked] = []
        index, count = 0, len(positions)
        while index < count:
            end = index + 1
            step = 0
            if end < count and first[index]:
                step = int(first[end] - first[index] == 1)
            while (
                end < count
                and first[end] - first[end - 1] == step
                and last[end] == last[index]
                and sinks[end] == sinks[index]
            ):
                end += 1
            rows, keys, begin = slice(index, end), int(last[index]), int(first[index])
            index = end
            if not keys:
                continue
            if not begin:
                asked.append(RowsAsked(rows, keys, -1, 0, False))
            elif step:
                asked.append(RowsAsked(rows, keys, keys - (end - rows.start) - begin, int(sinks[rows.start]), False))
            else:
                asked.append(RowsAsked(rows, keys, keys - 1 - begin, int(sinks[rows.start]), True))
        return asked

    def _bounds(self, worker: int, positions: _Ints, length: int, mask: KeyMask) -> tuple[_Ints, _Ints, _Ints]:
        """(sinks, first, last) of each row, in keys of the worker; first is 0 where one range has all."""
        begins = positions[:, None]
        ranges = mask.key_ranges(begins, begins + 1, np.zeros((1, 1), np.int64), length)
        bounds = [np.broadcast_to(np.clip(edge, 0, length), begins.shape)[:, 0] for edge in ranges]
        sinks, first, last = (self.before(worker, edge) for edge in bounds)
        empty = last <= first
        joined = empty | (first <= sinks)
        last = np.where(empty, sinks, np.maximum(last, sinks))
        return np.where(joined, 0, sinks), np.where(joined, 0, first), last
