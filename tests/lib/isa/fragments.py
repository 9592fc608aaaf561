"""Register fragments of `mma` and `wgmma`: which thread holds which element (PTX ISA 9.7.14.5, 9.7.15.5.1.1).

The formulas are the ISA's, one condition after the other, on the element's index i within a thread; nothing is shared
between layouts that the ISA prints apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T", bound=np.generic)
Word = TypeVar("Word", bound=np.unsignedinteger)

Place = Callable[[int, int], tuple[int, int]]
"""(lane, i) -> (row, column)."""


@dataclass(frozen=True)
class Fragment:
    """A matrix (rows, columns) spread over threads, `elements` a thread in the order a0, a1, ...

    lanes: threads that hold it, 32 (a warp) or 128 (a warpgroup). place: the position of a thread's element i.
    """

    rows: int
    columns: int
    lanes: int
    elements: int
    place: Place

    def places(self) -> npt.NDArray[np.int64]:
        """(row, column) of every thread's elements, int64 of shape (lanes, elements, 2)."""
        return _places(self)

    def taken(self, matrix: npt.NDArray[T]) -> npt.NDArray[T]:
        """The elements of `matrix` (rows, columns) that each thread holds: shape (lanes, elements)."""
        places = self.places()
        return matrix[places[..., 0], places[..., 1]]

    def given(self, held: npt.NDArray[T]) -> npt.NDArray[T]:
        """The matrix (rows, columns) whose elements `held` (lanes, elements) the threads hold."""
        places = self.places()
        matrix = np.zeros((self.rows, self.columns), dtype=held.dtype)
        matrix[places[..., 0], places[..., 1]] = held
        return matrix


@cache
def _places(fragment: Fragment) -> npt.NDArray[np.int64]:
    lanes, elements = range(fragment.lanes), range(fragment.elements)
    return np.array([[fragment.place(lane, i) for i in elements] for lane in lanes], dtype=np.int64)


def packed(held: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.uint32]:
    """Elements as bits (lanes, elements) into 32-bit registers, "low to high" (PTX ISA 9.7.14.5)."""
    return np.ascontiguousarray(held).view(np.uint32)


def unpacked(registers: npt.NDArray[np.uint32], word: type[Word]) -> npt.NDArray[Word]:
    """32-bit registers (lanes, registers) into elements as bits (lanes, elements), low to high."""
    return np.ascontiguousarray(registers).view(word)


def _a_16_of_16_bits(lane: int, i: int) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    row = group if 0 <= i < 2 or 4 <= i < 6 else group + 8
    return row, thread * 2 + (i & 1) + (0 if i < 4 else 8)


def _a_8_of_32_bits(lane: int, i: int) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    return group if i in (0, 2) else group + 8, thread if i in (0, 1) else thread + 4


def _a_32_of_8_bits(lane: int, i: int) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    row = group if 0 <= i < 4 or 8 <= i < 12 else group + 8
    return row, thread * 4 + (i & 3) + (0 if i < 8 else 16)


def _b_16_of_16_bits(lane: int, i: int) -> tuple[int, int]:
    return (lane % 4) * 2 + (i & 1) + (0 if i < 2 else 8), lane >> 2


def _b_8_of_32_bits(lane: int, i: int) -> tuple[int, int]:
    return lane % 4 if i == 0 else lane % 4 + 4, lane >> 2


def _b_32_of_8_bits(lane: int, i: int) -> tuple[int, int]:
    return (lane % 4) * 4 + (i & 3) + (0 if i < 4 else 16), lane >> 2


def _c(lane: int, i: int) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    return group if i < 2 else group + 8, thread * 2 + (i & 1)


_MULTIPLICANDS: dict[tuple[int, int], tuple[Place, Place]] = {
    (16, 16): (_a_16_of_16_bits, _b_16_of_16_bits),
    (8, 32): (_a_8_of_32_bits, _b_8_of_32_bits),
    (32, 8): (_a_32_of_8_bits, _b_32_of_8_bits),
}


@cache
def mma_a(k: int, bits: int) -> Fragment:
    """Multiplicand A (16, k) of `mma.m16n8k{k}` with elements of `bits` bits (PTX ISA 9.7.14.5)."""
    place, _ = _MULTIPLICANDS[k, bits]
    return Fragment(16, k, 32, 16 * k // 32, place)


@cache
def mma_b(k: int, bits: int) -> Fragment:
    """Multiplicand B (k, 8) of `mma.m16n8k{k}` with elements of `bits` bits."""
    _, place = _MULTIPLICANDS[k, bits]
    return Fragment(k, 8, 32, 8 * k // 32, place)


@cache
def mma_c() -> Fragment:
    """Accumulators C and D (16, 8) of every `mma.m16n8k*`."""
    return Fragment(16, 8, 32, 4, _c)


@cache
def wgmma_a(bits: int) -> Fragment:
    """Multiplicand A (64, 32 bytes) of `wgmma.m64nNk*` in registers, elements of 8, 16 or 32 bits.

    PTX ISA 9.7.15.5.1.1.1 to .3: warp w of the warpgroup holds rows 16 w to 16 w + 15 as `mma.m16n8k*` lays them out
    (figures 148, 150, 152).
    """
    k = 256 // bits
    place, _ = _MULTIPLICANDS[k, bits]

    def placed(thread: int, i: int) -> tuple[int, int]:
        row, column = place(thread % 32, i)
        return thread // 32 * 16 + row, column

    return Fragment(64, k, 128, 64 * k // 128, placed)


@cache
def wgmma_d(n: int) -> Fragment:
    """Accumulator D (64, n) of `wgmma.m64n{n}k*`, n a multiple of 8 up to 256.

    PTX ISA 9.7.15.5.1.1.1 to .3 (figures 149, 151, 153): d0 to d3 cover columns 0 to 7, d4 to d7 columns 8 to 15, and
    so on.
    """

    def placed(thread: int, i: int) -> tuple[int, int]:
        warp, lane = divmod(thread, 32)
        row = warp * 16 + lane // 4 + (8 if i % 4 >= 2 else 0)
        return row, i // 4 * 8 + lane % 4 * 2 + i % 2

    return Fragment(64, n, 128, n // 2, placed)
