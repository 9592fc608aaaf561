"""Tensor loads, stores and reductions of every rank and swizzle, over every edge."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from kernel_runs import KernelRun, Place, Runner, TensorMapArgument, pointer
from layouts import WIDTH, swizzle_lines

FILE = "conformance/tensors.cu"
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Move:
    """shape, box, load, store: innermost first. The box is loaded at `load` and stored or added at `store`."""

    dtype: Any
    shape: tuple[int, ...]
    box: tuple[int, ...]
    load: tuple[int, ...]
    store: tuple[int, ...]
    swizzle: str = "none"
    add: bool = False


INSIDE_AND_OVER_EDGES = [
    Move(np.float32, (40,), (16,), (8,), (24,)),
    Move(np.float32, (40,), (16,), (-4,), (32,)),
    Move(np.float16, (80, 9), (64, 5), (-24, 6), (40, -2), "128B"),
    Move(np.float16, (64, 37), (64, 16), (0, 30), (0, 30), "128B"),
    Move(ml_dtypes.bfloat16, (64, 20), (32, 8), (32, -3), (-8, 15), "64B"),
    Move(ml_dtypes.bfloat16, (48, 12), (16, 10), (16, 4), (32, 0), "32B"),
    Move(np.uint8, (96, 6), (48, 3), (64, -1), (0, 4)),
    Move(np.float32, (32, 5, 4), (32, 2, 3), (0, 4, 2), (8, -1, 3), "128B"),
    Move(np.float16, (64, 17, 3, 2), (64, 8, 1, 1), (0, 12, 2, 1), (0, 5, 2, 0), "128B"),
    Move(np.float16, (32, 5, 3, 2), (32, 4, 2, 2), (8, 3, 2, -1), (0, -1, 1, 1), "64B"),
    Move(np.int32, (8, 3, 4, 2, 3), (4, 2, 3, 2, 2), (6, 2, -1, 1, 0), (0, 2, 1, 0, -1)),
    Move(np.float32, (40,), (16,), (100,), (0,)),
    Move(np.float32, (40, 4), (16, 2), (8, 1), (24, 3), add=True),
    Move(np.float16, (64, 12), (64, 8), (0, 2), (-16, 8), "128B", add=True),
    Move(ml_dtypes.bfloat16, (64, 9), (32, 4), (16, 6), (48, 0), "64B", add=True),
    Move(np.int32, (16, 3, 3), (8, 2, 2), (4, 1, 1), (12, 2, 0), add=True),
]


def window(array: Array, start: tuple[int, ...], box: tuple[int, ...]) -> tuple[Array, Array]:
    """The box at start as flat indices, and which of its elements are inside. Array axes are outermost first."""
    axes = [np.arange(s, s + n) for s, n in zip(reversed(start), reversed(box), strict=True)]
    grids = np.meshgrid(*axes, indexing="ij")
    inside = np.ones(grids[0].shape, bool)
    for grid, extent in zip(grids, array.shape, strict=True):
        inside &= (grid >= 0) & (grid < extent)
    safe = [np.where(inside, grid, 0) for grid in grids]
    return np.ravel_multi_index(safe, array.shape), inside


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    return rng.integers(1 if dtype is np.uint8 else -100, 100, tuple(reversed(shape))).astype(dtype)


@pytest.mark.parametrize("move", INSIDE_AND_OVER_EDGES, ids=str)
def test_a_box_moves_with_zeros_outside_and_nothing_written_there(runner: Runner, move: Move) -> None:
    rng = np.random.default_rng(0)
    source, target = numbers(rng, move.shape, move.dtype), numbers(rng, move.shape, move.dtype)
    dtype, rank = np.dtype(move.dtype), len(move.shape)
    row = move.box[0] * dtype.itemsize
    loaded, inside = window(source, move.load, move.box)
    box = np.where(inside, source.reshape(-1)[loaded], 0).astype(dtype)
    lines = np.ascontiguousarray(box).view(np.uint8).reshape(-1, row)
    image = swizzle_lines(lines, move.swizzle) if move.swizzle == "none" or row == WIDTH[move.swizzle] else None
    expected = target.reshape(-1).copy()
    stored, inside = window(target, move.store, move.box)
    old = expected[stored[inside]] if move.add else np.zeros((), dtype)
    expected[stored[inside]] = (old + box[inside]).astype(dtype)

    strides = tuple(int(np.prod(move.shape[:d])) * dtype.itemsize for d in range(1, rank))

    def params(place: Place) -> list[bytes]:
        maps = [
            place.tensor_map(TensorMapArgument(name, dtype.name, move.shape, strides, move.box, move.swizzle))
            for name in ("source", "target")
        ]
        coordinates = [*move.load, *[0] * (5 - rank), *move.store, *[0] * (5 - rank)]
        return [*maps, pointer(place, "image"), struct.pack("<10iIi", *coordinates, box.nbytes, move.add)]

    arrays = {"source": source, "target": target, "image": np.zeros(box.nbytes // 4, np.uint32)}
    run = KernelRun(FILE, f"move_{rank}", arrays, params, block=64, shared_bytes=box.nbytes + 8)
    assert image is not None
    for result in runner(run):
        result.check(image=image.reshape(-1).view(np.uint32), target=expected)
