"""Splitting the work of a decode launch: complete, even and fast."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from cases.cached_batches import random_batch
from cases.decode import VARIANTS, draw
from emulated.decode import DecodeCase, key_of, problem_of
from inside.bench import plan
from inside.reference import visible_keys
from support.timing import below, median_seconds, yardsticks

from gpu_actors import AttentionProblem
from gpu_actors.kernels.decode_mma import ranges_of
from gpu_actors.kernels.decode_schedule import ITEM_UNITS, Schedule, min_units, splitter, workload
from gpu_actors.kernels.decode_tiles import ROW_TILES, decode_tile, row_tile_of
from gpu_actors.kernels.dispatch import program_of
from gpu_actors.kernels.occupancy import shared_a_multiprocessor, shared_mem_limit
from gpu_actors.kernels.program import Target
from gpu_actors.kernels.support import capability


def planned(case: DecodeCase, ranges: int) -> tuple[AttentionProblem, Any, Schedule]:
    problem = problem_of(case, case.operands())
    key = key_of(problem, "sm_80")
    rows = None if case.rows is None else np.array(case.rows)
    return problem, key, splitter(problem, key, ranges)(case.batch.lengths, rows)


def walk(schedule: Schedule) -> list[list[tuple[int, int, int, int]]]:
    """The pieces of each range as the kernel goes through them: (entry, head, first tile, last tile)."""
    load, ranges = schedule.workload, []
    for begin, end in zip(schedule.positions[:-1].tolist(), schedule.positions[1:].tolist(), strict=True):
        entry, head, tile, _ = begin
        pieces: list[tuple[int, int, int, int]] = []
        while (entry, head, tile) < tuple(end[:3]):
            count = int(load.tiles[entry])
            stop = end[2] if (entry, head) == tuple(end[:2]) else count
            if load.splits:
                n = max(1, min(load.splits, count))
                stop = next((j * count // n for j in range(1, n + 1) if j * count // n > tile), count)
            if load.exists[entry]:
                pieces.append((entry, head, tile, stop))
            tile = stop
            if stop == count:
                entry, head, tile = (entry, head + 1, 0) if head + 1 < load.heads else (entry + 1, 0, 0)
        ranges.append(pieces)
    return ranges


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_ranges_are_all_of_the_work_and_nothing_twice(variant):
    for seed in range(3):
        case = draw(variant, seed)
        for ranges in (1, 5, 40):
            _, _, schedule = planned(case, ranges)
            load, walked = schedule.workload, walk(schedule)
            tiles: dict[tuple[int, int], int] = {}
            for entry, head, first, last in itertools.chain.from_iterable(walked):
                assert tiles.get((entry, head), 0) == first, "pieces follow each other"
                tiles[entry, head] = last
            wanted = {(e, h): int(load.tiles[e]) for e in np.flatnonzero(load.exists) for h in range(load.heads)}
            assert tiles == wanted
            loads = [sum(last - first + ITEM_UNITS for _, _, first, last in pieces) for pieces in walked]
            np.testing.assert_array_equal(plan.loads(schedule), loads)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_tiles_are_those_that_hold_a_visible_key(variant):
    """By brute force over the oracle's masks: a tile that the table leaves out would give wrong numbers."""
    for seed in range(3):
        case = draw(variant, seed, 700)
        problem = problem_of(case, case.operands())
        key = key_of(problem, variant.arch)
        rows = np.full(len(case.batch.k), problem.seqlen_q) if case.rows is None else np.array(case.rows)
        load, block = workload(problem, key, case.batch.lengths, rows), key.row_tile
        tile = decode_tile(key).tile.block_n
        counts = load.tiles.reshape(len(rows), -1)
        for index, length in enumerate(case.batch.lengths):
            for part in range(counts.shape[1]):
                packed = np.arange(part * block, min((part + 1) * block, rows[index] * problem.gqa_ratio))
                seen = visible_keys(
                    np.unique(packed // problem.gqa_ratio),
                    int(rows[index]),
                    int(length),
                    causal=problem.causal,
                    window_size=problem.window_size,
                    sink_tokens=problem.sink_tokens,
                )
                keys = np.ones(length, bool) if seen is None else seen.any(axis=0)
                needed = len({int(k) // tile for k in np.flatnonzero(keys)}) if packed.size else 0
                assert counts[index, part] >= needed
                assert counts[index, part] <= needed + (needed > 0), "at most one tile more than needed"


def test_ranges_are_not_cut_smaller_than_it_is_worth():
    case = DecodeCase(random_batch(0, (64 * 11,), heads=(1, 1), dim=64, dtype="float16"), options={"causal": True})
    _, key, schedule = planned(case, 100)
    assert min_units(key) == 2
    assert (plan.loads(schedule) > 0).sum() == (11 + ITEM_UNITS) // 2


def split_on_hopper(lengths: Any, **changes: Any) -> Schedule:
    """Over the 132 multiprocessors of an H100."""
    problem = dataclasses.replace(plan.problem_of(lengths), **changes)
    key = key_of(problem, "sm_90a")
    assert min_units(key) >= 2
    return splitter(problem, key, ranges_of(key, 132))(lengths, None)


def test_a_short_sequence_alone_keeps_nearly_all_multiprocessors_busy():
    """Each range is longer than the cost of beginning an item."""
    lengths = np.full(1, 2048, np.int32)
    assert (plan.loads(split_on_hopper(lengths)) > 0).sum() >= 0.9 * 132
    for kv_dtype in ("bfloat16", "float8_e4m3fn"):
        positions = split_on_hopper(lengths, kv_dtype=kv_dtype).positions
        used = positions[positions[:, 0] < 1][:, 1:3]
        assert len(np.unique(used, axis=0)) == len(used) > 1, "no two ranges begin at one place"


def test_the_modelled_work_falls_evenly():
    for name, lengths in plan.batches().items():
        schedule = split_on_hopper(lengths)
        assert 1.0 <= plan.balance(schedule) <= 1.1, name
        assert (plan.loads(schedule) > 0).all(), "every block has work"
    skewed = split_on_hopper(plan.batches()["skewed_256"], num_splits=1)
    assert plan.balance(skewed) > 3, "one long sequence would set the time if it were not split"


@pytest.mark.perf
def test_four_thousand_sequences_are_planned_in_a_millisecond():
    """1 ms on one core is 4.5 yardsticks."""
    lengths = plan.batches()["mixed_4096"]
    problem = plan.problem_of(lengths)
    key = key_of(problem, "sm_90a")
    below(4.5, lambda: yardsticks(median_seconds(lambda: splitter(problem, key, 264)(lengths, None), 31)))


def test_the_benchmark_says_what_it_measured():
    figures = plan.run()
    assert set(figures) == set(plan.batches())
    assert all(figure["plan_us"] > 0 for figure in figures.values())  # type: ignore[index]


class TestTiles:
    def test_pinned_splits_take_the_tile_of_the_heads_alone(self):
        problem = plan.problem_of(np.full(4, 100, np.int32))
        wide = dataclasses.replace(problem, seqlen_q=8, total_q=32)
        assert row_tile_of(problem) == 16
        assert row_tile_of(wide) == 64
        assert row_tile_of(dataclasses.replace(wide, num_splits=2)) == 16

    @pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
    def test_every_head_dim_has_a_tile_that_fits(self, arch):
        base = plan.problem_of(np.full(4, 100, np.int32))
        limit = shared_mem_limit(capability(arch))
        for kv_dtype, step in (("bfloat16", 8), ("float8_e4m3fn", 16)):
            dims = range(32, 257, 2 * step)
            for dim, dim_v, rows in itertools.product(dims, dims, ROW_TILES):
                sizes = {"head_dim": dim, "head_dim_v": dim_v, "heads_q": 8 * rows}
                problem = dataclasses.replace(base, kv_dtype=kv_dtype, **sizes)  # type: ignore[arg-type]
                tile = decode_tile(key_of(problem, arch))
                assert tile.tile.stages >= 2
                assert tile.shared_bytes <= limit
                assert tile.blocks * (tile.shared_bytes + 1024) <= shared_a_multiprocessor(arch)

    def test_grids_and_scratch_do_not_depend_on_lengths(self):
        one, other = (plan.problem_of(np.full(4, length, np.int32)) for length in (64, 60))
        assert one.seqlen_k == other.seqlen_k
        key = key_of(one, "sm_90a")
        for planned_by_host in (True, False):
            programs = [program_of(problem, key, Target(132, None, planned_by_host)) for problem in (one, other)]
            assert programs[0].keys == programs[1].keys
            assert programs[0].scratch == programs[1].scratch


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_lengths_of_as_many_tiles_share_a_split_that_is_as_any_other(causal: bool, rows: int) -> None:
    """The shared split equals that of rows given by sequence, which each launch computes anew."""
    case = DecodeCase(
        random_batch(4, (300, 0, 5, 700), rows=rows, heads=(4, 2), dim=32, dtype="float16"), options={"causal": causal}
    )
    problem = problem_of(case, case.operands())
    key = key_of(problem, "sm_80")
    rng = np.random.default_rng(0)
    split = splitter(problem, key, 40)
    for lengths in [case.batch.lengths, *rng.integers(0, 700, (40, 4), np.int32)]:
        every = split(lengths, np.full(4, rows))
        found = split(lengths, None)
        np.testing.assert_array_equal(found.positions, every.positions)
        tile = decode_tile(key).tile.block_n
        alike = split(-(-lengths // tile) * tile, None)
        assert alike.positions is found.positions
        assert not found.positions.flags.writeable
