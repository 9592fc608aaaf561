"""Which element each register of each lane holds in mma instructions, as the PTX ISA tables state it (9.7.14)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

DTYPES: dict[str, Any] = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "tf32": np.dtype(np.float32),
}
DEPTH = {"f16": 16, "bf16": 16, "e4m3": 32, "e5m2": 32, "tf32": 8}  # k of one mma


def a_fragment(a: Array) -> Array:
    """(16, k) elements -> (32 lanes, 4) words."""
    lane = np.arange(32)[:, None]
    per_word = 4 // a.itemsize
    i = np.arange(4 * per_word)[None, :]  # element of the lane
    word, inside = i // per_word, i % per_word
    row = lane // 4 + 8 * (word % 2)
    column = lane % 4 * per_word + inside + 4 * per_word * (word // 2)
    return np.ascontiguousarray(a[row, column]).view(np.uint32).reshape(32, 4)


def b_fragment(b: Array) -> Array:
    """(k, 8) elements -> (32 lanes, 2) words."""
    lane = np.arange(32)[:, None]
    per_word = 4 // b.itemsize
    i = np.arange(2 * per_word)[None, :]
    k = lane % 4 * per_word + i % per_word + 4 * per_word * (i // per_word)
    return np.ascontiguousarray(b[k, np.broadcast_to(lane // 4, k.shape)]).view(np.uint32).reshape(32, 2)


def c_fragment(c: Array) -> Array:
    """(16, 8) floats -> (32 lanes, 4)."""
    lane, i = np.arange(32)[:, None], np.arange(4)[None, :]
    return np.ascontiguousarray(c[lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2])


def small_values(rng: np.random.Generator, shape: tuple[int, ...], element: str) -> Array:
    """Values whose products and sums are exact in fp32, in any order: multiples of 1/4 up to 2."""
    return (rng.integers(-8, 9, shape) / 4).astype(DTYPES[element])
