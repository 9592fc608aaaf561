"""Shape buckets: steps of decoding are padded to few shapes, so that one recorded launch serves many of them.

A batch is padded to a power of two with sequences without keys, whose rows are zeros and are dropped. A block table is
padded to a power of two of columns. The added columns are never read.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from gpu_actors.arrays.device_array import DeviceArray, Joined
from gpu_actors.attention.requests import BatchedDecode, PagedForward
from gpu_actors.planning.append_rows import NewRows
from gpu_actors.planning.cached import CacheRequest

__all__ = ["bucket", "pad_request", "pad_rows", "recordable"]

_MOST_ROWS = 8  # of a sequence in a step of decoding, drafts included. Longer prefills are not recorded.
_ONES = ("k_descale", "v_descale", "q_descale", "q_positions", "k_positions")
_ZEROS = ("tree_mask", "alibi_slopes", "cache_leftpad")


def bucket(count: int) -> int:
    """The least power of two that is at least ``count``."""
    return 1 << max(0, count - 1).bit_length()


def recordable(request: CacheRequest, rows: NewRows | None = None) -> bool:
    """Whether recording the launch pays: it has a few rows of each sequence, all on the host."""
    names = ("q", "cache_seqlens", "seq_lens", "block_table", "sinks", *_ONES, *_ZEROS)
    if any(isinstance(getattr(request, name, None), DeviceArray | Joined) for name in names) or request.out is not None:
        return False
    if request.bias is not None:
        return False  # its shape changes with the longest sequence
    if rows is not None and (not rows.rows or not isinstance(rows.k, np.ndarray) or rows.rope_cos is not None):
        return False
    if rows is not None and rows.turned is not None:
        return False
    if isinstance(request, BatchedDecode):
        return False  # the caller's caches may have other addresses the next time
    if request.block_table is None or request.cu_seqlens_q is not None:
        return False
    return 0 < request.q.shape[1] <= _MOST_ROWS and len(request.q) > 0


def pad_batch(array: Any, batch: int, value: float = 0) -> Any:
    if len(array) == batch:
        return array
    padding = np.full((batch - len(array), *array.shape[1:]), value, array.dtype)
    return np.concatenate([array, padding])


def pad_request(request: PagedForward) -> PagedForward:
    """The request with its batch and its block table padded."""
    batch = bucket(len(request.cache_seqlens))
    changes: dict[str, Any] = {name: pad_batch(getattr(request, name), batch) for name in ("q", "cache_seqlens")}
    table: Any = request.block_table
    changes["block_table"] = padded = np.full((batch, bucket(table.shape[1])), -1, np.int32)
    padded[: len(table), : table.shape[1]] = table
    for value, names in ((1, _ONES), (0, _ZEROS)):
        for name in names:
            array = getattr(request, name)
            if array is not None and not (name == "alibi_slopes" and array.ndim == 1):
                changes[name] = pad_batch(array, batch, value)
    return dataclasses.replace(request, **changes)


def pad_rows(rows: NewRows) -> NewRows:
    """The request's new rows, padded like its batch. Rows of sequences without keys are not written."""
    batch = bucket(len(rows.counts))
    total = batch * rows.rows
    changes: dict[str, Any] = {name: pad_batch(getattr(rows, name), total) for name in ("k", "v")}
    if rows.positions is not None:
        changes["positions"] = pad_batch(rows.positions, total)
    return dataclasses.replace(rows, counts=pad_batch(rows.counts, batch, rows.rows), **changes)
