"""Tensor loads, stores and reductions of every rank and swizzle, over every edge."""

from __future__ import annotations

import numpy as np
import pytest
from isa import tma
from kernel_runs import Runner
from second_reading import box_case

# Boxes begin at multiples of 16 bytes of a row, and stores at no negative coordinate: an H100 takes no others. Where a
# row of the tensor ends within 16 bytes, the rest of these is written too.
MOVES = [  # dtype, shape, box, place of the load, place of the store, swizzle; innermost first
    ("float32", (40,), (16,), (8,), (24,), 0),
    ("float32", (40,), (16,), (-4,), (32,), 0),
    ("float32", (40,), (16,), (100,), (0,), 0),
    ("float16", (80, 9), (64, 5), (-24, 6), (40, 7), 128),
    ("bfloat16", (64, 20), (32, 8), (32, -3), (48, 15), 64),
    ("bfloat16", (48, 12), (16, 10), (16, 4), (32, 0), 32),
    ("uint8", (96, 6), (48, 3), (64, -1), (0, 4), 0),
    ("float32", (32, 5, 4), (32, 2, 3), (0, 4, 2), (8, 4, 3), 128),
    ("float16", (32, 5, 3, 2), (32, 4, 2, 2), (8, 3, 2, -1), (0, 3, 1, 1), 64),
    ("int32", (8, 3, 4, 2, 3), (4, 2, 3, 2, 2), (4, 2, -1, 1, 0), (0, 2, 1, 0, 2), 0),
    ("float32", (37,), (16,), (8,), (32,), 0),
    ("float32", (5, 4), (16, 3), (-4, 0), (0, 2), 0),
    ("uint8", (31, 5), (32, 3), (-16, -1), (16, 1), 0),
    ("uint8", (17, 3), (16, 2), (16, 0), (32, 1), 0),
    ("float16", (9, 4, 3), (8, 2, 2), (0, 2, -1), (8, 1, 2), 0),
    ("float16", (67, 9), (64, 5), (8, 2), (64, 6), 128),
]
SUMS = [
    ("float32", (40, 4), (16, 2), (8, 1), (24, 3), 0),
    ("float16", (64, 12), (64, 8), (0, 2), (16, 8), 128),
    ("bfloat16", (64, 9), (32, 4), (16, 6), (48, 0), 64),
    ("int32", (16, 3, 3), (8, 2, 2), (4, 1, 1), (12, 2, 0), 0),
    ("float32", (5, 4), (4, 3), (0, 0), (4, 2), 0),
    ("float32", (3,), (4,), (0,), (0,), 0),
    ("float16", (9, 6), (16, 4), (-8, 1), (0, 3), 0),
    ("float16", (35, 9), (32, 4), (8, 6), (32, 2), 64),
]


@pytest.mark.parametrize(("add", "move"), [(add, move) for add, moves in enumerate((MOVES, SUMS)) for move in moves])
def test_a_box_moves_with_zeros_outside_and_whole_units_written(
    runner: Runner, add: int, move: tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int]
) -> None:
    dtype, shape, box, load, store, mode = move
    size = {"uint8": 1, "float16": 2, "bfloat16": 2}.get(dtype, 4)
    row = -(-shape[0] * size // 16) * 16
    strides = tuple(int(np.prod(shape[1:axis])) * row for axis in range(1, len(shape)))
    case = box_case(tma.TensorMap(size, shape, strides, box, mode), load, store, bool(add), 0, dtype)
    for result in runner(case.run):
        result.check(**case.expected)
