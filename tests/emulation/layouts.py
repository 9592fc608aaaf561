"""Shared-memory layouts of TMA boxes and wgmma operands, by lines and 16-byte units rather than by address bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

WIDTH = {"none": 16, "32B": 32, "64B": 64, "128B": 128}  # bytes of a line
NUMBER = {"none": 0, "128B": 1, "64B": 2, "32B": 3}  # in a wgmma descriptor


def unit_in_line(line: Array, unit: Array, swizzle: str) -> Array:
    """Where 16-byte unit `unit` of line `line` lies in its line: lines are WIDTH[swizzle] bytes long."""
    flips: dict[str, Array] = {"128B": line % 8, "64B": line // 2 % 4, "32B": line // 4 % 2, "none": 0 * line}
    return np.bitwise_xor(unit, flips[swizzle])


def swizzle_lines(lines: Array, swizzle: str) -> Array:
    """(n, WIDTH) bytes as they lie in shared memory."""
    if swizzle == "none":
        return lines
    n, width = lines.shape
    units = lines.reshape(n, width // 16, 16)
    line, unit = np.arange(n)[:, None], np.arange(width // 16)[None, :]
    image = np.empty_like(units)
    image[line, unit_in_line(line, unit, swizzle)] = units
    return image.reshape(n, width)


class Operand:
    """A wgmma operand placed in shared memory: its bytes, its descriptor (from address 0) and what a K step adds."""

    def __init__(self, image: Array, leading: int, stride: int, swizzle: str, step: int) -> None:
        self.image = image
        self.descriptor = leading >> 4 << 16 | stride >> 4 << 32 | NUMBER[swizzle] << 62
        self.step = step >> 4


def k_major(elements: Array, swizzle: str) -> Operand:
    """elements: (rows, k) with 64 bytes of k. Rows are grouped by 8; panels of WIDTH bytes of k follow each other."""
    data = np.ascontiguousarray(elements).view(np.uint8)
    rows, width = len(data), WIDTH[swizzle]
    if swizzle == "none":  # core matrices of 8 rows x 16 bytes: along k first, then along rows
        core = data.reshape(rows // 8, 8, 4, 16).transpose(0, 2, 1, 3)
        return Operand(core.reshape(-1), 128, 512, swizzle, 256)
    padded = np.zeros((rows, max(64, width)), np.uint8)
    padded[:, :64] = data
    panels = padded.reshape(rows, -1, width).transpose(1, 0, 2)
    image = np.concatenate([swizzle_lines(panel, swizzle) for panel in panels])
    return Operand(image.reshape(-1), 16, 8 * width, swizzle, 32 if width >= 64 else rows * width)


def mn_major(elements: Array, swizzle: str) -> Operand:
    """elements: (rows, 32) of two bytes, stored with rows innermost. Atoms: 8 k by WIDTH bytes of rows."""
    rows, k = elements.shape
    width = WIDTH[swizzle]
    columns = width // 2
    padded = np.zeros((-(-rows // columns) * columns, k), elements.dtype)
    padded[:rows] = elements
    lines = np.ascontiguousarray(padded.reshape(-1, columns, k).transpose(0, 2, 1))  # (block of rows, k, rows)
    image = np.concatenate([swizzle_lines(block.view(np.uint8), swizzle) for block in lines])
    along_rows, along_k = k * width, 8 * width
    if swizzle == "none":
        return Operand(image.reshape(-1), along_k, along_rows, swizzle, 2 * along_k)
    return Operand(image.reshape(-1), along_rows, along_k, swizzle, 2 * along_k)
