"""Checks of a cache's lengths and block tables on the host against the memory of the cache.

Arrays on a device are not read here, because that would wait for the device: kernels limit lengths to the capacity
themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu_actors.fields import expect

__all__ = ["check_batch_idx", "check_block_table", "check_leftpad", "check_lengths"]


def check_lengths(field: str, lengths: Any, capacity: int | Sequence[int]) -> None:
    """Raise `InvalidRequest` unless each length lies in [0, capacity]. capacity: of each sequence, or of all."""
    if not isinstance(lengths, np.ndarray):
        return
    if isinstance(capacity, int) and _all_within(lengths, capacity):
        return
    least = int(lengths.min(initial=0))
    expect(least >= 0, field, least, "must not be negative")
    room = np.broadcast_to(np.asarray(capacity, np.int64), lengths.shape)
    if lengths.size:
        worst = int(np.argmax(lengths - room))
        most, limit = int(lengths[worst]), int(room[worst])
        expect(most <= limit, field, most, f"must be at most the keys that a sequence has room for, {limit}")


def _all_within(numbers: Any, most: int) -> bool:
    """Whether each number lies in [0, most]. Read as unsigned, a negative number is larger than any limit."""
    return int(numbers.view(f"u{numbers.itemsize}").max(initial=0)) <= most


def check_leftpad(leftpad: Any, lengths: Any, capacity: int) -> None:
    """Raise `InvalidRequest` unless each sequence's padding lies in [0, its length]."""
    if not isinstance(leftpad, np.ndarray):
        return
    least = int(leftpad.min(initial=0))
    expect(least >= 0, "cache_leftpad", least, "must not be negative")
    most = lengths if isinstance(lengths, np.ndarray) else np.full(leftpad.shape, capacity)
    for index in np.flatnonzero(leftpad > most)[:1]:
        reason = f"must be at most the sequence's rows in the cache, {int(most[index])}"
        expect(False, "cache_leftpad", int(leftpad[index]), reason)


def check_batch_idx(places: Any, sequences: int) -> None:
    """Raise `InvalidRequest` unless each index names one of the cache's sequences."""
    if not isinstance(places, np.ndarray):
        return
    for place in places[(places < 0) | (places >= sequences)][:1]:
        expect(False, "cache_batch_idx", int(place), f"must name a sequence of the cache: 0 to {sequences - 1}")


def check_block_table(block_table: Any, lengths: Any, page_size: int, blocks: int, leftpad: Any = None) -> None:
    """Raise `InvalidRequest` unless each page that a sequence's keys reach lies in a pool of ``blocks`` pages.

    leftpad: how many rows lie before each sequence's first key. Pages of such rows alone are not read.
    """
    if not isinstance(block_table, np.ndarray) or not isinstance(lengths, np.ndarray):
        return
    if _all_within(block_table, blocks - 1):
        return
    pages = -(-lengths.astype(np.int64) // page_size)
    columns = np.arange(block_table.shape[1])
    used = columns < pages[:, None]
    if isinstance(leftpad, np.ndarray):
        used &= columns >= leftpad[:, None] // page_size
    wrong = used & ((block_table < 0) | (block_table >= blocks))
    if wrong.any():
        sequence, column = (int(index) for index in np.argwhere(wrong)[0])
        page = int(block_table[sequence, column])
        reason = f"page {column} of sequence {sequence} must lie in the pool: 0 to {blocks - 1}"
        expect(False, "block_table", page, reason)
