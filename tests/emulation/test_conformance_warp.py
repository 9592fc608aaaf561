"""Shuffles, votes, barriers and atomics do what CUDA C++ says, in every order of threads and blocks."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from kernel_runs import KernelRun, Runner, pointer, pointers

FILE = "conformance/warp.cu"
LANE = np.arange(32)


@pytest.fixture
def values() -> np.ndarray:
    return np.random.default_rng(0).integers(-(1 << 30), 1 << 30, 32).astype(np.int32)


def test_shuffles_move_values_between_lanes(runner: Runner, values: np.ndarray) -> None:
    up = np.where(LANE >= 3, LANE - 3, LANE)
    up_8 = np.where(LANE % 8 >= 1, LANE - 1, LANE)
    down = np.where(LANE + 7 < 32, LANE + 7, LANE)
    down_16 = np.where(LANE % 16 + 2 < 16, LANE + 2, LANE)
    half = np.where(LANE < 16, 15 - LANE, 47 - LANE)
    xor_4_in_4 = np.where(LANE ^ 4 < LANE, LANE ^ 4, LANE)  # a lower segment may be read, a higher one not
    sources = [
        np.full(32, 5),
        LANE // 8 * 8 + LANE * 3 % 8,
        LANE ^ 1,
        LANE ^ 16,
        xor_4_in_4,
        up,
        up_8,
        down,
        down_16,
        np.zeros(32, int),
        LANE ^ 8,
        half,
    ]
    run = KernelRun(FILE, "shuffles", {"in": values, "out": np.zeros((12, 32), np.int32)}, pointers("in", "out"))
    for result in runner(run):
        result.check(out=np.stack([values[s] for s in sources]))


def test_votes_and_reductions_agree_in_all_lanes(runner: Runner, values: np.ndarray) -> None:
    ballot = np.array(sum(1 << lane for lane in range(32) if values[lane] & 1), np.uint32).astype(np.int32)
    total = np.int64(values.sum()).astype(np.uint32).astype(np.int32)
    expected = [ballot, 1, int((values != 0).all()), total, values.max(), values.min()]
    run = KernelRun(FILE, "votes", {"in": values, "out": np.zeros((6, 32), np.int32)}, pointers("in", "out"))
    for result in runner(run):
        result.check(out=np.repeat(np.array(expected, np.int32)[:, None], 32, 1))


def test_syncthreads_and_static_shared_memory_serve_each_block_alone(runner: Runner) -> None:
    numbers = np.random.default_rng(1).integers(-1000, 1000, (7, 96)).astype(np.int32)
    arrays = {"in": numbers, "out": np.zeros((7, 4), np.int32)}
    expected = np.stack([numbers.sum(1), (numbers & 1).sum(1), np.ones(7), np.zeros(7)], 1).astype(np.int32)
    for result in runner(KernelRun(FILE, "block_sum", arrays, pointers("in", "out"), block=96, grid=7)):
        result.check(out=expected)


def test_named_barriers_hand_a_slot_back_and_forth(runner: Runner) -> None:
    rounds = 5
    run = KernelRun(
        FILE,
        "named_barriers",
        {"out": np.zeros((3, 32), np.int32)},
        lambda place: [pointer(place, "out"), struct.pack("<i", rounds)],
        block=128,
    )
    expected = sum((i * 100 + (31 - LANE) for i in range(rounds)), np.zeros(32)).astype(np.int32)
    for result in runner(run):
        result.check(out=np.tile(expected, (3, 1)))


def test_an_arrival_does_not_wait(runner: Runner) -> None:
    run = KernelRun(FILE, "crossed_barriers", {"out": np.zeros(32, np.int32)}, pointers("out"), block=64)
    for result in runner(run):
        result.check(out=(3 * (31 - LANE)).astype(np.int32))


def test_the_last_block_to_arrive_sees_all_parts(runner: Runner) -> None:
    blocks = 9
    arrays = {
        "parts": np.full((blocks, 32), np.nan, np.float32),
        "arrived": np.zeros(5, np.int32),
        "out": np.zeros(32, np.float32),
        "sums": np.zeros(32, np.float32),
    }
    run = KernelRun(FILE, "last_arrival", arrays, pointers("parts", "arrived", "out", "sums"), grid=blocks)
    number = np.arange(blocks)
    for result in runner(run):
        result.check(
            out=(number[:, None] + LANE * 0.5).sum(0).astype(np.float32),
            sums=np.full(32, number.sum(), np.float32),
            arrived=np.array([blocks, 2 * (blocks - 1), -(blocks - 1), 7, 9], np.int32),
        )


def test_blocks_take_turns_by_acquire_and_release(runner: Runner) -> None:
    blocks = 6
    counters = {name: np.zeros(1, np.int32) for name in ("drawn", "turn", "released")}
    arrays = {**counters, "order": np.zeros(blocks, np.int32)}
    run = KernelRun(FILE, "turns", arrays, pointers("drawn", "turn", "order", "released"), grid=blocks, block=64)
    for result in runner(run):
        result.check(order=np.arange(blocks, dtype=np.int32) * 10, turn=np.array([blocks]), released=np.array([blocks]))
