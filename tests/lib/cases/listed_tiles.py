"""How many tiles of a kernel the lists of `packed_block_masks` name."""

from __future__ import annotations

import numpy as np
from cases.packed_block_masks import BATCH, BLOCK, KEYS, KINDS, ROWS
from support.gate import kernel_source

import gpu_actors as ga

__all__ = ["listed_tiles"]


def listed_tiles(key: ga.DispatchKey) -> int:
    """Tiles of the listed blocks, without those behind the last row or key of each sequence."""
    macros, seen = kernel_source(key).macros, 0
    for n in range(BATCH):
        rows, keys = np.arange(0, ROWS[n], int(macros["BLOCK_M"])), np.arange(0, KEYS[n], int(macros["BLOCK_N"]))
        seen += int((KINDS[n] > 0)[:, rows // BLOCK][:, :, keys // BLOCK].sum())
    return seen
