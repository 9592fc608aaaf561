"""`ldmatrix`, `stmatrix` and `movmatrix` of 8 by 8 matrices with elements of 16 bits (PTX ISA 9.7.14.5.15 to .17)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def _rows(addresses: npt.ArrayLike, count: int) -> npt.NDArray[np.int64]:
    """Addresses of the rows, (count, 8): threads 8 m to 8 m + 7 give the rows of matrix m."""
    return np.asarray(addresses, dtype=np.int64)[: 8 * count].reshape(count, 8)


def loaded(
    memory: npt.NDArray[np.uint8], addresses: npt.ArrayLike, count: int, transposed: bool = False
) -> npt.NDArray[np.uint32]:
    """`ldmatrix.sync.aligned.m8n8.x{count}{.trans}.shared.b16`.

    Four consecutive threads hold one row of a matrix, two neighbouring elements a thread, the lower column in the
    lower half. With `.trans` the matrix is read as stored by columns, so four threads hold one column.

    memory: shared memory, uint8 (bytes,). addresses: one byte address a thread, (32,), of which the first 8 * count are
    used. Returns uint32 (32, count): register m of a thread belongs to matrix m.
    """
    registers = np.zeros((32, count), dtype=np.uint32)
    for m, starts in enumerate(_rows(addresses, count)):
        matrix = np.array([memory[start : start + 16].view(np.uint16) for start in starts])
        for lane in range(32):
            row, pair = lane // 4, lane % 4
            if transposed:
                low, high = matrix[2 * pair, row], matrix[2 * pair + 1, row]
            else:
                low, high = matrix[row, 2 * pair], matrix[row, 2 * pair + 1]
            registers[lane, m] = int(low) | int(high) << 16
    return registers


def stored(
    memory: npt.NDArray[np.uint8], addresses: npt.ArrayLike, registers: npt.NDArray[np.uint32], transposed: bool = False
) -> npt.NDArray[np.uint8]:
    """Memory after `stmatrix.sync.aligned.m8n8.x{count}{.trans}.shared.b16`, the reverse of `loaded`."""
    after = memory.copy()
    for m, starts in enumerate(_rows(addresses, registers.shape[1])):
        matrix = np.zeros((8, 8), dtype=np.uint16)
        for lane in range(32):
            row, pair = lane // 4, lane % 4
            word = int(registers[lane, m])
            for half in range(2):
                element = word >> 16 * half & 0xFFFF
                if transposed:
                    matrix[2 * pair + half, row] = element
                else:
                    matrix[row, 2 * pair + half] = element
        for start, line in zip(starts, matrix, strict=True):
            after[start : start + 16] = line.view(np.uint8)
    return after


def moved(registers: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """`movmatrix.sync.aligned.m8n8.trans.b16`, uint32 (32,): a matrix held by rows becomes its transpose."""
    matrix = registers.reshape(8, 4).copy().view(np.uint16)
    return np.ascontiguousarray(matrix.T).view(np.uint32).reshape(32)
