"""Tensor loads, stores and reductions of every rank and swizzle, over every edge."""

from __future__ import annotations

import numpy as np
import pytest
from isa import tma
from kernel_runs import Runner
from second_reading import box_case

MOVES = [  # dtype, shape, box, place of the load, place of the store, swizzle; innermost first
    ("float32", (40,), (16,), (8,), (24,), 0),
    ("float32", (40,), (16,), (-4,), (32,), 0),
    ("float32", (40,), (16,), (100,), (0,), 0),
    ("float16", (80, 9), (64, 5), (-24, 6), (40, -2), 128),
    ("bfloat16", (64, 20), (32, 8), (32, -3), (-8, 15), 64),
    ("bfloat16", (48, 12), (16, 10), (16, 4), (32, 0), 32),
    ("uint8", (96, 6), (48, 3), (64, -1), (0, 4), 0),
    ("float32", (32, 5, 4), (32, 2, 3), (0, 4, 2), (8, -1, 3), 128),
    ("float16", (32, 5, 3, 2), (32, 4, 2, 2), (8, 3, 2, -1), (0, -1, 1, 1), 64),
    ("int32", (8, 3, 4, 2, 3), (4, 2, 3, 2, 2), (6, 2, -1, 1, 0), (0, 2, 1, 0, -1), 0),
]
SUMS = [
    ("float32", (40, 4), (16, 2), (8, 1), (24, 3), 0),
    ("float16", (64, 12), (64, 8), (0, 2), (-16, 8), 128),
    ("bfloat16", (64, 9), (32, 4), (16, 6), (48, 0), 64),
    ("int32", (16, 3, 3), (8, 2, 2), (4, 1, 1), (12, 2, 0), 0),
]


@pytest.mark.parametrize(("add", "move"), [(add, move) for add, moves in enumerate((MOVES, SUMS)) for move in moves])
def test_a_box_moves_with_zeros_outside_and_nothing_written_there(
    runner: Runner, add: int, move: tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
) -> None:
    dtype, shape, box, load, store, mode = move
    size = {"uint8": 1, "float16": 2, "bfloat16": 2}.get(dtype, 4)
    strides = tuple(int(np.prod(shape[:axis])) * size for axis in range(1, len(shape)))
    case = box_case(tma.TensorMap(size, shape, strides, box, mode), load, store, bool(add), 0, dtype)
    for result in runner(case.run):
        result.check(**case.expected)
