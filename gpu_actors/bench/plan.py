"""The time of splitting a decode launch, and the balance of the modelled work.

It needs no GPU. The figures are the median time over many plans on the calling thread, in microseconds, and the
balance: the largest load of a block over the mean load. A load counts tiles of keys and the cost of beginning a piece
(`gpu_actors.kernels.decode_schedule`). The budgets are 1,000 us for 4,096 sequences and a balance of 1.1 on a batch in
which few sequences are long.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import numpy.typing as npt

from gpu_actors.attention.problem import AttentionProblem
from gpu_actors.kernels.decode_mma import ranges_of
from gpu_actors.kernels.decode_schedule import ITEM_UNITS, Schedule, before, splitter
from gpu_actors.kernels.dispatch import dispatch_key
from gpu_actors.kernels.support import example_problem

__all__ = ["balance", "batches", "loads", "problem_of", "run"]

_ARCH, _MULTIPROCESSORS = "sm_90a", 132
_REPEATS = 200


def problem_of(lengths: npt.NDArray[np.int32], num_splits: int = 0) -> AttentionProblem:
    """One new row per sequence over pages of 64 keys, with 64 query heads, 8 KV heads and head_dim 128 in bfloat16."""
    batch, columns = lengths.size, -(-int(lengths.max()) // 64)
    return example_problem(
        "bfloat16",
        128,
        layout="paged",
        batch=batch,
        seqlen_q=1,
        seqlen_k=columns * 64,
        total_q=batch,
        total_k=int(lengths.sum()),
        heads_q=64,
        heads_kv=8,
        causal=True,
        page_size=64,
        num_splits=num_splits,
    )


def batches() -> dict[str, npt.NDArray[np.int32]]:
    """Lengths of batches, by name. skewed: two long sequences among short ones. mixed: lengths from 16 to 16,384."""
    rng = np.random.default_rng(0)
    skewed = rng.integers(64, 512, 256).astype(np.int32)
    skewed[[17, 101]] = 65_536, 32_768
    return {
        "one_32k": np.full(1, 32_768, np.int32),
        "even_32x8k": np.full(32, 8_192, np.int32),
        "skewed_256": skewed,
        "mixed_4096": np.exp(rng.uniform(np.log(16), np.log(16_384), 4_096)).astype(np.int32),
    }


def loads(schedule: Schedule) -> npt.NDArray[np.int64]:
    """The modelled work of each range: its tiles of keys, and ITEM_UNITS for each piece that it begins."""
    positions, load = schedule
    entry, head, tile = (positions[:, column].astype(np.int64) for column in range(3))
    index = np.minimum(entry, load.tiles.size - 1)  # the end position has head and tile 0
    count, cut = load.tiles[index], load.pieces[index]
    tile_at = before(load.tiles * load.heads)[entry] + head * count + tile
    # With pinned splits every position begins a piece. Otherwise a range that ends inside an item has one piece more.
    pieces_before = -(-tile * cut // np.maximum(count, 1)) if load.splits else np.zeros_like(tile)
    piece_at = before(load.pieces * load.exists * load.heads)[entry] + head * cut + pieces_before
    pieces = np.diff(piece_at) + ((tile[1:] > 0) & (load.splits == 0))
    work: npt.NDArray[np.int64] = np.diff(tile_at) + ITEM_UNITS * pieces
    return work


def balance(schedule: Schedule) -> float:
    """The largest load over the mean load of the ranges that have work. 1.0 is optimal."""
    work = loads(schedule)
    busy = int((work > 0).sum())
    return float(work.max() * busy / work.sum()) if busy else 1.0


def run() -> dict[str, object]:
    """For each batch the number of sequences and of ranges, the median microseconds of a plan, and the balance."""
    return {name: _measure(lengths) for name, lengths in batches().items()}


def _measure(lengths: npt.NDArray[np.int32]) -> dict[str, object]:
    problem = problem_of(lengths)
    key = dispatch_key(problem, _ARCH)
    ranges = ranges_of(key, _MULTIPROCESSORS)

    def plan() -> Schedule:
        return splitter(problem, key, ranges)(lengths, None)

    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        plan()
        times.append(time.perf_counter() - start)
    return {
        "sequences": lengths.size,
        "ranges": ranges,
        "plan_us": round(statistics.median(times) * 1e6, 1),
        "balance": round(balance(plan()), 3),
    }
