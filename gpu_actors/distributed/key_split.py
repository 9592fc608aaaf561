"""KeySplit: tells which worker has which keys of a sequence, and which requests let rows see their keys on each worker.

    3 workers, runs of 2     position   0  1 | 2  3 | 4  5 | 6  7 | 8  9 | 10 11 | 12
                             worker     0  0 | 1  1 | 2  2 | 0  0 | 1  1 |  2  2 |  0
    keys of worker 0, numbered on worker 0                   0  1    2  3             4

The keys of a worker are in order. So the keys that a row sees are [0, sinks) and [first, last) on every worker too,
with bounds that count the worker's keys. A cache takes such bounds as a window of a row that lies on the last key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_actors.attention.key_mask import KeyMask

__all__ = ["KeySplit", "RowRequest"]

_Ints = npt.NDArray[np.int64]


class RowRequest(NamedTuple):
    """A request to one worker for some rows.

    keys: how many of the worker's first keys the rows attend to.
    reach: how many keys the window reaches back from the row's own key, or -1 without a window.
    sinks: how many first keys stay visible.
    apart: whether each row is a sequence of one row, whose own key is the last one. Otherwise the rows are the last
        rows of one sequence, and see all keys after the beginning of their window.
    """

    rows: slice
    keys: int
    reach: int
    sinks: int
    apart: bool


class KeySplit(NamedTuple):
    """Keys divided among ``workers`` in runs of ``run`` keys, in turn. Worker 0 has the first run."""

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
        """(end - begin,): the worker that has the key at each position."""
        return np.arange(begin, end) // self.run % self.workers

    def position(self, worker: int, key: int) -> int:
        """The position of a worker's key in the whole sequence."""
        whole, rest = divmod(key, self.run)
        return (whole * self.workers + worker) * self.run + rest

    def step(self, length: int) -> int:
        """The distance between neighbouring keys of a worker in the first ``length``. 0 if it varies."""
        if self.workers == 1 or length <= self.run * self.workers:
            return 1
        return self.workers if self.run == 1 else 0

    def tree(self, worker: int, begin: int, sees: Any) -> Any:
        """uint64 (rows,): the tree mask of a worker's own last ``rows`` keys.

        sees: bool (rows, rows), which of the keys from ``begin`` on each row sees. It sees all earlier keys.
        """
        count = len(sees)
        own = np.flatnonzero(self.owners(begin, begin + count) == worker)
        bits = np.uint64(1) << np.arange(count, dtype=np.uint64)
        earlier = np.full(count, bits[: count - len(own)].sum(dtype=np.uint64), np.uint64)
        return earlier + np.where(sees[:, own], bits[count - len(own) :], np.uint64(0)).sum(axis=1, dtype=np.uint64)

    def asked(self, worker: int, positions: _Ints, length: int, mask: KeyMask) -> list[RowRequest]:
        """The requests to a worker for rows at consecutive ``positions``, and the first ``length`` keys.

        mask: the mask of the whole problem. Rows that see no key of the worker are in no request.
        """
        sinks, first, last = self._bounds(worker, positions, length, mask)
        requests: list[RowRequest] = []
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
                requests.append(RowRequest(rows, keys, -1, 0, False))
            elif step:
                requests.append(
                    RowRequest(rows, keys, keys - (end - rows.start) - begin, int(sinks[rows.start]), False)
                )
            else:
                requests.append(RowRequest(rows, keys, keys - 1 - begin, int(sinks[rows.start]), True))
        return requests

    def _bounds(self, worker: int, positions: _Ints, length: int, mask: KeyMask) -> tuple[_Ints, _Ints, _Ints]:
        """(sinks, first, last) of each row, in keys of the worker. first is 0 if one range has all visible keys."""
        begins = positions[:, None]
        ranges = mask.key_ranges(begins, begins + 1, np.zeros((1, 1), np.int64), length)
        bounds = [np.broadcast_to(np.clip(edge, 0, length), begins.shape)[:, 0] for edge in ranges]
        sinks, first, last = (self.before(worker, edge) for edge in bounds)
        empty = last <= first
        joined = empty | (first <= sinks)
        last = np.where(empty, sinks, np.maximum(last, sinks))
        return np.where(joined, 0, sinks), np.where(joined, 0, first), last
