"""Checks of a cache's lengths and block tables against the memory that there is, where they lie on the host.

What lies on a device is not read here, which would wait for it: kernels hold lengths within the capacity themselves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu_actors.validation.fields import expect

__all__ = ["check_block_table", "check_lengths"]


def check_lengths(field: str, lengths: Any, capacity: int) -> None:
    """Raise `InvalidRequest` unless each length lies in [0, capacity]."""
    if not isinstance(lengths, np.ndarray):
        return
    least, most = int(lengths.min(initial=0)), int(lengths.max(initial=0))
    expect(least >= 0, field, least, "must not be negative")
    expect(most <= capacity, field, most, f"must be at most the keys that a sequence has room for, {capacity}")


def check_block_table(block_table: Any, lengths: Any, page_size: int, blocks: int) -> None:
    """Raise `InvalidRequest` unless each page that a sequence's length reaches lies in a pool of ``blocks`` pages."""
    if not isinstance(block_table, np.ndarray) or not isinstance(lengths, np.ndarray):
        return
    pages = -(-lengths.astype(np.int64) // page_size)
    used = np.arange(block_table.shape[1]) < pages[:, None]
    wrong = used & ((block_table < 0) | (block_table >= blocks))
    if wrong.any():
        sequence, column = (int(index) for index in np.argwhere(wrong)[0])
        page = int(block_table[sequence, column])
        reason = f"page {column} of sequence {sequence} must lie in the pool: 0 to {blocks - 1}"
        expect(False, "block_table", page, reason)
