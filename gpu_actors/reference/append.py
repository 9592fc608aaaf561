"""append_rows and copy_pages: the contents of a KV cache after new rows were appended, or pages copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu_actors.reference.arguments import Array
from gpu_actors.reference.rope import apply_rope

__all__ = ["LARGEST", "AppendedRow", "append_rows", "appended_rows", "cast_saturating", "copy_pages"]

LARGEST: dict[str, float] = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""The number at which a cache of this dtype saturates: the dtype's largest."""


class AppendedRow(NamedTuple):
    """The place of a new row. row: its index in the packed rows. place: its index in its sequence, from 0."""

    row: int
    sequence: int
    place: int


def appended_rows(cu_seqlens: Array, cache_seqlens: Array) -> Iterator[AppendedRow]:
    """Yield the place of each new row.

    cu_seqlens: (batch + 1,), the bounds of the packed rows. cache_seqlens: (batch,), each sequence's keys, new ones
    included.
    """
    ends, lengths = np.asarray(cu_seqlens).tolist(), np.asarray(cache_seqlens).tolist()
    for sequence, length in enumerate(lengths):
        first, end = ends[sequence], ends[sequence + 1]
        for row in range(first, end):
            yield AppendedRow(row, sequence, length - (end - row))


def cast_saturating(x: Array, dtype: npt.DTypeLike, descale: Array | float = 1.0) -> Array:
    """x as elements of a cache: rounded to nearest even. fp8 is scaled by 1 / descale in float32, and saturated.

    NaN stays NaN. Values beyond float16's range become infinite.
    """
    target = np.dtype(dtype)
    if x.dtype == target:
        return x
    with np.errstate(all="ignore"):
        if target.name not in LARGEST:
            return np.asarray(x.astype(target))
        scale = np.float32(1.0) / np.asarray(descale, np.float32)
        scaled = x.astype(np.float32) * scale
        return np.asarray(np.clip(scaled, -LARGEST[target.name], LARGEST[target.name]).astype(target))


def append_rows(
    k: Array,
    v: Array,
    k_cache: Array | Sequence[Array],
    v_cache: Array | Sequence[Array],
    cu_seqlens: Array,
    cache_seqlens: Array,
    *,
    block_table: Array | None = None,
    rope: tuple[Array, Array] | None = None,
    interleaved: bool = False,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
) -> None:
    """Write the new rows k, v (total, heads_kv, dim) into the caches, in place.

    k_cache, v_cache: pages (num_blocks, page_size, heads_kv, dim) with ``block_table`` (batch, max_blocks), else a
        dense cache (batch, max_seq, heads_kv, dim), or a list with an array (heads_kv, max_seq, dim) per sequence.
    cu_seqlens, cache_seqlens: as in `appended_rows`. Rows without a place in their cache are not written.
    rope: (cos, sin), each (total, pairs), of the new rows' own positions; rotates K in float64 and rounds it once.
    k_descale, v_descale: fp32 (batch, heads_kv) for an fp8 cache, whose elements are value / descale.
    """
    rotated: Array = k if rope is None else apply_rope(k, *rope, interleaved=interleaved)
    for rows, cache, descale in ((rotated, k_cache, k_descale), (v, v_cache, v_descale)):
        for row, sequence, place in appended_rows(cu_seqlens, cache_seqlens):
            target = _row_of(cache, block_table, sequence, place)
            if target is not None:
                factor = 1.0 if descale is None else descale[sequence][:, None]
                target[...] = cast_saturating(rows[row], target.dtype, factor)


def copy_pages(caches: Sequence[Array], pairs: Array) -> None:
    """Copy pages within each of the pools, in place. pairs: (n, 2) of (source, destination)."""
    for source, destination in np.asarray(pairs).tolist():
        for cache in caches:
            cache[destination] = cache[source]


def _row_of(cache: Any, block_table: Array | None, sequence: int, place: int) -> Array | None:
    if place < 0:
        return None
    if block_table is not None:
        page_size = cache.shape[1]
        if place >= block_table.shape[1] * page_size:
            return None
        block = int(block_table[sequence, place // page_size])
        found: Array | None = cache[block, place % page_size] if 0 <= block < len(cache) else None
        return found
    if isinstance(cache, np.ndarray):
        return None if place >= cache.shape[1] else np.asarray(cache[sequence, place])
    return None if place >= cache[sequence].shape[1] else np.asarray(cache[sequence][:, place])
