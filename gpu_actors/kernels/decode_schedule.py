"""Splits the work of a decode launch into ranges of equal length, on the host, from lengths that the host knows.

kernels_cu/decode/plan.cuh defines the terms. If lengths lie on the device, decode_plan computes the same positions
there. Splitting the whole work into equal ranges is stream-K (Osama et al., arXiv 2301.03598).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gpu_actors.attention.problem import AttentionProblem, DispatchKey
from gpu_actors.kernels.decode_tiles import decode_tile, row_tiles
from gpu_actors.kernels.rules import RANGE_KEYS

__all__ = ["ITEM_UNITS", "Schedule", "Workload", "before", "min_units", "splitter"]

Ints: TypeAlias = npt.NDArray[np.int64]

_MIN_UNITS = 2  # of a range: a single unit may be the beginning of an item, without keys
_LENGTHS = 64  # batches of different lengths whose ranges a splitter keeps
ITEM_UNITS = 1  # the cost of beginning an item, in tiles of keys


class Workload(NamedTuple):
    """The work to split. tiles: the tiles of keys of each entry. exists: whether an entry has rows."""

    tiles: Ints
    exists: npt.NDArray[np.bool_]
    heads: int
    splits: int

    @property
    def units(self) -> Ints:
        """The units of one item of each entry."""
        units: Ints = np.where(self.exists, self.tiles + ITEM_UNITS, 0)
        return units

    @property
    def pieces(self) -> Ints:
        """The pieces that an item of each entry is cut into, independent of the ranges."""
        return np.maximum(1, np.minimum(self.splits, self.tiles))


class Schedule(NamedTuple):
    """positions: int32 (ranges + 1, 4): entry, KV head and tile where each range begins and the last one ends."""

    positions: npt.NDArray[np.int32]
    workload: Workload


Split: TypeAlias = Callable[[npt.NDArray[Any], npt.NDArray[Any] | None], Schedule]
"""Maps the keys of each sequence (batch,) and its new rows, None if all have ``seqlen_q``, to the ranges."""


def splitter(problem: AttentionProblem, key: DispatchKey, ranges: int) -> Split:
    """Return what splits the launches of a problem. Its lengths and rows must be within the problem's limits."""
    tile, least = decode_tile(key).tile.block_n, min_units(key)

    @functools.lru_cache(maxsize=_LENGTHS)
    def of_tiles(counts: bytes) -> Schedule:
        """The ranges of sequences with these tiles of keys, int64 (batch,), if their rows fit into a block."""
        schedule = split(np.frombuffer(counts, np.int64) * tile, None)
        schedule.positions.flags.writeable = False
        return schedule

    def split(lengths: npt.NDArray[Any], rows: npt.NDArray[Any] | None) -> Schedule:
        return _split(least, ranges, workload(problem, key, lengths, rows))

    def split_by_tiles(lengths: npt.NDArray[Any], rows: npt.NDArray[Any] | None) -> Schedule:
        # The last row sees all keys. A decoding step adds one key, and most steps add no tile.
        if rows is not None:
            return split(lengths, rows)
        return of_tiles(((lengths.astype(np.int64) + tile - 1) // tile).tobytes())

    in_tiles = problem.mask in ("full", "causal") and row_tiles(problem, key.row_tile) == 1
    return split_by_tiles if in_tiles else split


def _split(least: int, ranges: int, load: Workload) -> Schedule:
    """least: the fewest units of a range."""
    units = load.units
    sums = before(units * load.heads)
    total, entries = int(sums[-1]), units.size
    used = min(ranges, max(1, total // least)) if total else 0
    positions = np.zeros((ranges + 1, 4), np.int32)
    positions[:, 0] = entries
    if used:
        at = np.arange(used) * total // used
        entry = np.searchsorted(sums[:-1], at, side="right") - 1
        rest = at - sums[entry]
        head, tile = rest // units[entry], np.maximum(0, rest % units[entry] - ITEM_UNITS)
        if load.splits:
            entry, head, tile = _at_a_piece(load, entry, head, tile)
        positions[:used, 0], positions[:used, 1], positions[:used, 2] = entry, head, tile
    return Schedule(positions, load)


def min_units(key: DispatchKey) -> int:
    """The fewest units of a range, if the work has as many."""
    return max(_MIN_UNITS, RANGE_KEYS // decode_tile(key).tile.block_n)


def workload(
    problem: AttentionProblem, key: DispatchKey, lengths: npt.NDArray[Any], rows: npt.NDArray[Any] | None
) -> Workload:
    """The key tiles that each entry's rows see."""
    tile = decode_tile(key).tile.block_n
    block_m, tiles_of_rows, ratio = key.row_tile, row_tiles(problem, key.row_tile), problem.gqa_ratio
    keys = lengths.astype(np.int64)[:, None]
    rows = np.full_like(keys, problem.seqlen_q) if rows is None else rows.astype(np.int64)[:, None]
    packed = np.arange(tiles_of_rows, dtype=np.int64) * block_m
    packed_end = np.minimum(rows * ratio, packed + block_m)
    seen = problem.key_ranges(packed // ratio, -(-packed_end // ratio), keys - rows, keys)
    sinks = -(-seen.sinks // tile)
    begin = np.maximum(sinks, seen.first // tile)
    end = np.where(seen.first < seen.last, -(-seen.last // tile), 0)
    counts = sinks + np.maximum(begin, end) - begin
    exists = packed < packed_end
    return Workload((counts * exists).ravel(), exists.ravel(), problem.heads_kv, problem.num_splits)


def _at_a_piece(load: Workload, entry: Ints, head: Ints, tile: Ints) -> tuple[Ints, Ints, Ints]:
    """Move positions forward to where the next piece begins."""
    count, pieces = load.tiles[entry], load.pieces[entry]
    piece = -(-tile * pieces // np.maximum(count, 1))
    past = (tile > 0) & (piece == pieces)
    head = head + past
    over = head == load.heads
    return entry + over, np.where(over, 0, head), np.where(past, 0, piece * count // pieces)


def before(counts: npt.NDArray[Any]) -> Ints:
    """The sum of the counts before each count, followed by the sum of all."""
    sums = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums
