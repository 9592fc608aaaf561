"""Swizzling of shared memory, as the tables of the PTX ISA print it (5.5.7, "Swizzling Modes").

The tables are written out below, and nothing is derived from a formula: a table's row is one line of 128 bytes, a cell
is 16 bytes, and the number in a cell says which cell of the unswizzled line lies there. The pattern repeats after the
last row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

CELL: Final = 16
"""Bytes that a swizzle keeps together: the swizzle atomicity of all modes below."""

LINE: Final = 128
"""Bytes in one row of a table."""

TABLES: Final[Mapping[int, tuple[tuple[int, ...], ...]]] = {
    0: ((0, 1, 2, 3, 4, 5, 6, 7),),
    32: (
        (0, 1, 2, 3, 4, 5, 6, 7),
        (1, 0, 3, 2, 5, 4, 7, 6),
    ),
    64: (
        (0, 1, 2, 3, 4, 5, 6, 7),
        (1, 0, 3, 2, 5, 4, 7, 6),
        (2, 3, 0, 1, 6, 7, 4, 5),
        (3, 2, 1, 0, 7, 6, 5, 4),
    ),
    128: (
        (0, 1, 2, 3, 4, 5, 6, 7),
        (1, 0, 3, 2, 5, 4, 7, 6),
        (2, 3, 0, 1, 6, 7, 4, 5),
        (3, 2, 1, 0, 7, 6, 5, 4),
        (4, 5, 6, 7, 0, 1, 2, 3),
        (5, 4, 7, 6, 1, 0, 3, 2),
        (6, 7, 4, 5, 2, 3, 0, 1),
        (7, 6, 5, 4, 3, 2, 1, 0),
    ),
}
"""For each mode (its bytes, 0 for none): which cell of the unswizzled line lies at each place of each line."""


def period(mode: int) -> int:
    """Bytes after which the pattern of `mode` repeats."""
    return len(TABLES[mode]) * LINE


def swizzled(addresses: npt.ArrayLike, mode: int, base_offset: int = 0) -> npt.NDArray[np.int64]:
    """The addresses of the bytes that an unswizzled layout puts at `addresses` (PTX ISA 5.5.7).

    The pattern is anchored to shared memory itself: its first line begins where address / 128 and `base_offset` (0 to
    7) agree modulo the number of lines ("swizzle base offset", as in the matrix descriptor of 9.7.15.5.1.2.2).
    """
    table = np.array(TABLES[mode], dtype=np.int64)
    # A table maps place -> source cell; a store asks for source cell -> place.
    place = np.argsort(table, axis=1)
    address = np.asarray(addresses, dtype=np.int64)
    line = address // LINE
    cell = address % LINE // CELL
    row = (line - base_offset) % len(table)
    return np.asarray(line * LINE + place[row, cell] * CELL + address % CELL, dtype=np.int64)
